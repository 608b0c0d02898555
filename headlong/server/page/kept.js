// What the browser keeps for this page, where it lets us: settings for good, the API key as long as the tab.

export function load(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(`headlong.${name}`));
  } catch {
    return null;
  }
}

export function save(storage, name, value) {
  try {
    window[storage].setItem(`headlong.${name}`, JSON.stringify(value));
  } catch {
    // A browser without storage asks again next time.
  }
}
