// The figures that an engine's host has kept, slice by slice, as the tiles show them: of all engine cores together.

const LEAST_COURSE_SECONDS = 300;
const COURSE_SLICES = 30;

export class Kept {
  // `answer` is the kernel's (widgets/dashboard/past.py); `numBlocksOf(rank)` are the blocks of an engine core, or its slots.
  constructor({ begin, end, ranks }, numBlocksOf) {
    Object.assign(this, { begin, end, ranks, numBlocksOf });
    this.seconds = ranks[0].seconds; // of a slice
    this.known = new Map(); // number of a slice → its figures, where they were asked for
  }

  // Return the figures at a time, with the seconds that they are of; null where none were kept.
  at(time) {
    if (!(time >= this.begin && time <= this.end)) return null;
    const last = this.ranks[0].gap.length - 1;
    const slice = Math.min(last, Math.floor((time - this.begin) / this.seconds));
    if (!this.known.has(slice)) this.known.set(slice, this.figures(slice));
    return this.known.get(slice);
  }

  figures(slice) {
    const parts = this.ranks.filter((rank) => rank.tokens_per_second[slice] !== null);
    if (!parts.length) return null;
    const total = (valueOf) => parts.reduce((sum, rank) => sum + valueOf(rank), 0);
    const sum = (column) => total((rank) => rank[column][slice]);
    const highest = (column) => {
      const values = parts.map((rank) => rank[column][slice]).filter((value) => value !== null);
      return values.length ? Math.max(...values) : null;
    };
    return {
      since: this.begin + slice * this.seconds,
      seconds: this.seconds,
      tokens_in_per_second: sum("prompt_tokens_per_second"),
      tokens_out_per_second: sum("tokens_per_second"),
      time_to_first_token: highest("ttft_p50"),
      first_token_p95: highest("ttft_p95"),
      first_token_p99: highest("ttft_p99"),
      inter_token_latency: highest("itl_p50"),
      inter_token_p95: highest("itl_p95"),
      inter_token_p99: highest("itl_p99"),
      memory_bytes: null,
      num_blocks: total((rank) => this.numBlocksOf(rank.rank)),
      used_blocks: total((rank) => rank.kv_usage[slice] * this.numBlocksOf(rank.rank)),
      queries: sum("prefix_cache_queries"),
      hits: sum("prefix_cache_hits"),
    };
  }

  // List [time, whether nothing is known before it, figures] of the slices that a tile's course has at a time.
  course(time) {
    const { begin, seconds } = this;
    const from = time - Math.max(LEAST_COURSE_SECONDS, COURSE_SLICES * seconds);
    const points = [];
    let isGap = true;
    for (let at = Math.max(0, Math.ceil((from - begin) / seconds)); begin + (at + 0.5) * seconds <= time; at += 1) {
      const middle = begin + (at + 0.5) * seconds;
      const figures = this.at(middle);
      if (figures) points.push([middle, isGap, figures]);
      isGap = !figures;
    }
    return points;
  }
}
