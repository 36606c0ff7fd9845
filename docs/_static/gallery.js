// The choices of the gallery: values of three fields lead to a picture, a command and its counts.
// The fragment of the address keeps the last choice: #allreduce/ring/5, #1f1b/4/8.
(() => {
  const data = window.mpidistGallery;
  const widgets = [];
  for (const root of document.querySelectorAll(".gallery")) {
    const kind = root.dataset.kind, found = data[kind], form = root.querySelector("form");
    const [first, second, third] = ["first", "second", "third"].map((n) => form.elements[n]);
    const part = (name) => root.querySelector(`.gallery-${name}`);
    const values = () => [first.value, second.value, third.value];
    const about = (a, b) => data.about[kind === "collectives" ? `${a}/${b}` : a];

    // The algorithms of the collective; those that cannot serve this number of ranks say so.
    const list = (wanted) => {
      if (second.tagName !== "SELECT") return;
      const names = new Set();
      for (const key of Object.keys(found)) {
        const [a, b] = key.split("/");
        if (a === first.value) names.add(b);
      }
      second.replaceChildren(...[...names].map((name) => {
        const refused = found[`${first.value}/${name}/${third.value}`].why_not;
        return new Option(refused ? `${name} (not on ${third.value})` : name, name);
      }));
      second.value = names.has(wanted) ? wanted : [...names][0];
    };

    const show = (keep) => {
      list(second.value);
      const chosen = values(), key = chosen.join("/"), it = found[key];
      const words = about(...chosen), img = root.querySelector("img");
      for (const field of [first, second, third]) {
        const out = field.parentElement.querySelector("output");
        if (out) out.textContent = field.value;
      }
      part("about").textContent = words[0];
      part("picture").hidden = Boolean(it.why_not);
      part("alone").hidden = Boolean(it.why_not);
      const name = `_static/gallery/${chosen.join("-").replaceAll("_", "-")}.svg`;
      if (!it.why_not) {
        if (img.getAttribute("src") !== name) img.src = name;
        img.alt = `${chosen.join(" ")}: ${it.says}`;
        part("alone").href = name;
      }
      part("says").textContent = it.why_not ? `No picture: ${it.why_not}` : it.says;
      part("says").classList.toggle("refused", Boolean(it.why_not));
      part("command").textContent = it.command;
      part("page").href = words[1];
      part("here").href = `#${key}`;
      if (keep) history.replaceState(null, "", `#${key}`);
    };

    const take = (fragment) => {
      if (!(fragment in found)) return false;
      const [a, b, c] = fragment.split("/");
      first.value = a;
      third.value = c;
      list(b);
      second.value = b;
      show(false);
      return true;
    };

    form.addEventListener("input", () => show(true));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = part("link").hidden = false;
    show(false);
    widgets.push([root, take]);
  }
  const follow = () => {
    const fragment = decodeURIComponent(location.hash.slice(1));
    for (const [root, take] of widgets) if (take(fragment)) root.scrollIntoView();
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
