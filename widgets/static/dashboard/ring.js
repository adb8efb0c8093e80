// Rows of numbers in typed arrays. The newest `limit` are kept; rows are called by ids that count up from 0.

export class Ring {
  // `columns`: name → type of array; each becomes a property, to be read at `slot(id)`.
  constructor(columns, limit) {
    this.columns = columns;
    this.limit = limit;
    this.size = Math.min(limit, 1024);
    this.begin = 0;
    this.end = 0;
    for (const [name, type] of Object.entries(columns)) this[name] = new type(this.size);
  }

  slot(id) {
    return id % this.size;
  }

  // Make room for one row more and return its id; its cells hold what was there before.
  push() {
    if (this.end - this.begin === this.size) {
      if (this.size < this.limit) this.grow();
      else this.begin += 1;
    }
    this.end += 1;
    return this.end - 1;
  }

  grow() {
    const size = Math.min(this.limit, this.size * 2);
    for (const [name, type] of Object.entries(this.columns)) {
      const old = this[name];
      const grown = new type(size);
      for (let id = this.begin; id < this.end; id += 1) grown[id % size] = old[id % this.size];
      this[name] = grown;
    }
    this.size = size;
  }

  // Find the first id from which on `column` is at least `value`; it must not go down.
  search(column, value) {
    const cells = this[column];
    let low = this.begin;
    let high = this.end;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (cells[this.slot(middle)] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}
