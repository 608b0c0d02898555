// How numbers are written.

export const whole = (value) => Math.round(value).toLocaleString("en");

/** Three digits that count, as in the terminal. */
export const round = (value) => value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);

export const percent = (share) => `${Math.round(share * 100)}%`;

export const seconds = (value) => (value < 1 ? `${whole(value * 1000)} ms` : `${round(value)} s`);
