// Elements of the page, made with their class and their text. Text is never read as markup.

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

export const byId = (id) => document.getElementById(id);
