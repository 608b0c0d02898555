// Changes to the page wait for the next frame, all together: a fast model gives many tokens between two frames.

const NEAR = 80; // pixels from its end at which a box still follows what is added
const waiting = new Set();
const followed = new Set();
let asked = false;

/** The same function waits only once. */
export function later(change) {
  waiting.add(change);
  if (asked) return;
  asked = true;
  // Frames stop in a tab that is not shown, and timers go on.
  if (document.hidden) setTimeout(flush, 100);
  else requestAnimationFrame(flush);
}

/** Keeps a scrolled box at its end while it grows, unless its reader has scrolled up. */
export function follow(box) {
  followed.add(box);
}

function flush() {
  asked = false;
  const atEnd = [...followed].filter((box) => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR);
  const changes = [...waiting];
  waiting.clear();
  for (const change of changes) change();
  for (const box of atEnd) box.scrollTop = box.scrollHeight;
}
