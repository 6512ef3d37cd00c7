"""JavaScript expressions that inspect a page in the browser."""

IS_UPDATED = "document.getElementById('age').textContent.startsWith('Updated')"

SENTENCE = "document.getElementById('sentence').textContent"
LEVEL = "document.getElementById('verdict').dataset.level"
AGE = "document.getElementById('age').textContent"
IS_STALE = "document.documentElement.classList.contains('is-stale')"

OPEN_ALL = "document.querySelectorAll('details:not([hidden])').forEach((each) => (each.open = true))"

# Let every second of the page pass in a twentieth of a second.
FAST = """(() => {
  const { setTimeout, setInterval } = window;
  const { now } = Date;
  const begun = now();
  window.setTimeout = (call, ms, ...rest) => setTimeout(call, ms / 20, ...rest);
  window.setInterval = (call, ms, ...rest) => setInterval(call, ms / 20, ...rest);
  Date.now = () => begun + (now() - begun) * 20;
})()"""

# WCAG 2.2, 1.4.3: contrast of every shown text against the nearest background colour; [ratio, text] where it is below
# `least`.
FAINT = """((least) => {
  const channels = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const luminance = ([r, g, b]) => {
    const part = (value) => (value / 255 <= 0.04045 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const [r, g, b, alpha = 1] = channels(getComputedStyle(each).backgroundColor);
      if (alpha > 0 && r !== undefined) return [r, g, b];
    }
    return channels(getComputedStyle(document.documentElement).backgroundColor);
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !node.checkVisibility({ checkVisibilityCSS: true })) continue;
    if (node.closest('noscript, .unseen, .skip')) continue;
    const style = getComputedStyle(node);
    const front = channels(node instanceof SVGElement ? style.fill : style.color);
    const [light, dark] = [luminance(front), luminance(behind(node))].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (!(ratio >= least)) found.push([ratio.toFixed(2), node.textContent.slice(0, 60)]);
  }
  return found;
})(4.5)"""

NONSENSE = """(document.title + ' ' + document.body.innerText + ' '
  + [...document.querySelectorAll('[aria-label]')].map((each) => each.getAttribute('aria-label')).join(' '))
  .match(/\\b(NaN|undefined|null|Infinity)\\b|\\[object|∞/g) ?? []"""

BENT = """[...document.querySelectorAll('svg *')].flatMap((each) => [...each.attributes])
  .filter(({ value }) => /NaN|undefined|Infinity/.test(value))
  .map(({ name, value }) => `${name}=${value.slice(0, 60)}`)"""

# List what users of assistive technology would miss.
UNLABELLED = """[
  ...[...document.querySelectorAll('svg[role=img], .lane[role=img]')]
    .filter((each) => !each.getAttribute('aria-label')),
  ...[...document.querySelectorAll('article, section')].filter((each) =>
    !document.getElementById(each.getAttribute('aria-labelledby') ?? '')?.textContent),
  ...[...document.querySelectorAll('table')].filter((each) => !each.caption?.textContent
    || [...each.querySelectorAll('th')].some((head) => !head.scope || !head.textContent)),
  ...[...document.querySelectorAll('summary, button, a')].filter((each) => !each.textContent.trim()),
  ...[...document.querySelectorAll('input')].filter((each) => !each.labels.length),
  ...[...document.querySelectorAll('[id]')]
    .filter((each, index, all) => all.some((other) => other !== each && other.id === each.id)),
].filter((each) => each.checkVisibility()).map((each) => each.outerHTML.slice(0, 120))"""

HEADINGS = "[...document.querySelectorAll('h1, h2, h3, h4')].map((each) => Number(each.tagName[1]))"

LANDMARKS = """Object.fromEntries(['header', 'nav[aria-label]', 'main', 'footer', '[role=status][aria-live=polite]']
  .map((name) => [name, document.querySelectorAll(name).length]))"""

TABBABLE = """[...document.querySelectorAll('a[href], button, summary, input, [tabindex="0"]')]
  .filter((each) => each.checkVisibility({ checkVisibilityCSS: true }))"""

# The focused element: its index among all focusable ones, whether it is in the window, and its outline.
FOCUS = f"""(() => {{
  const node = document.activeElement;
  const {{ left, right, top, bottom }} = node.getBoundingClientRect();
  const style = getComputedStyle(node);
  return {{
    place: {TABBABLE}.indexOf(node),
    isSeen: right > 0 && left < innerWidth && bottom > 0 && top < innerHeight,
    outline: style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth),
  }};
}})()"""

COLOURS = """((names) => Object.fromEntries(names.map((name) => {
  const style = getComputedStyle(document.documentElement);
  return [name, style.getPropertyValue(`--${name}`).trim()];
})))"""

# Landmarks that assistive technology cannot tell apart: those of one role with the same name (landmark-unique of axe).
SAME_LANDMARKS = """(() => {
  const selector = 'main, nav, section[aria-labelledby], section[aria-label], form[aria-label], [role=region]';
  const name = (node) => node.getAttribute('aria-label')
    ?? document.getElementById(node.getAttribute('aria-labelledby'))?.textContent ?? '';
  const role = (node) => node.getAttribute('role') ?? { SECTION: 'region' }[node.tagName] ?? node.tagName.toLowerCase();
  const landmarks = [...document.querySelectorAll(selector)].filter((node) => node.checkVisibility())
    .map((node) => `${role(node)} ${name(node).trim().toLowerCase()}`);
  return landmarks.filter((landmark, place) => landmarks.indexOf(landmark) !== place);
})()"""
