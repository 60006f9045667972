// Makes the static pictures interactive. Whatever goes wrong, the static picture stays.
// `ast` keeps Vega from building functions out of text, which the page's security policy forbids.
for (const figure of document.querySelectorAll("figure.chart")) {
  const spec = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const still = figure.querySelector(".still");
  const live = document.createElement("div");
  live.className = "live";
  live.hidden = true;
  figure.append(live);
  vegaEmbed(live, spec, { renderer: "svg", ast: true, actions: false, logLevel: 1 })
    .then(() => { still.remove(); live.hidden = false; figure.dataset.live = "yes"; })
    .catch((error) => { live.remove(); figure.dataset.live = "no"; figure.title = String(error); });
}
