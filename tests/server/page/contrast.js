// The least contrast (as WCAG counts it) between a text and what lies behind it, over all texts that are seen.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const layers = (element) => (element ? [...layers(element.parentElement), getComputedStyle(element).backgroundColor] : []);
  const painted = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const seen = (element) => element.checkVisibility() && !element.closest(".hidden, .skip, noscript");
  const contrasts = [...document.body.querySelectorAll("*")].filter((one) => own(one) && seen(one)).map((one) => {
    const behind = layers(one);
    const [low, high] = [painted(behind), painted([...behind, getComputedStyle(one).color])].map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
  return Math.min(...contrasts);
}
