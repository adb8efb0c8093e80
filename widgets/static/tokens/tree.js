// The answers and branches, as far as they are known.
export class Tree {
  constructor() {
    this.clear();
  }

  clear() {
    this.nodes = new Map();
    this.refusal = "";
  }

  // Take in a node; false if tokens are missing.
  take(news) {
    const known = this.nodes.get(news.id)?.tokens ?? [];
    if (news.start > known.length) return false;
    known.length = news.start;
    for (const token of news.tokens) known.push(token);
    this.nodes.set(news.id, { ...news, tokens: known });
    return true;
  }

  // List the nodes from a first answer to this one.
  path(id) {
    const path = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) path.unshift(node);
    return path;
  }

  // List all tokens of an answer, its parents' beginning included.
  whole(id) {
    let tokens = [];
    for (const node of this.path(id)) tokens = tokens.slice(0, node.position).concat(node.tokens);
    return tokens;
  }

  // Return the positions of an answer at which others branch off.
  forks(id) {
    const found = new Set();
    const path = this.path(id);
    path.forEach((node, depth) => {
      const end = path[depth + 1]?.position ?? Infinity;
      for (const child of this.nodes.values()) {
        if (child.parent === node.id && child.position <= end) found.add(child.position);
      }
    });
    return found;
  }
}
