// The word of a block, as the kernel sends it (the protocol is in widgets/dashboard/frames.py).

export const NUMBERS = 2 ** 19 - 1; // a word has its holder's number modulo this, or this if there is none
export const REFERENCES = 4095;

export function references(word) {
  return word & 0xfff;
}

export function isCached(word) {
  return (word & 0x1000) !== 0;
}

// Return the number of the request that took the block last, modulo `NUMBERS`; null if none did.
export function holderNumber(word) {
  const number = word >>> 13;
  return number === NUMBERS ? null : number;
}
