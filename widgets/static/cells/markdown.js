// Markdown is rendered as the notebook renders its other outputs, formulas included. A page that has no renderer for
// widgets keeps the text.
export async function renderMarkdown(model, place, markdown) {
  const rendermime = model.widget_manager?.rendermime;
  if (!rendermime) return;
  const renderer = rendermime.createRenderer("text/markdown");
  // What is not trusted goes through the notebook's sanitiser, too.
  const contents = rendermime.createModel({ data: { "text/markdown": markdown }, trusted: false });
  await renderer.renderModel(contents);
  place.className = "nbc-rendered";
  place.replaceChildren(renderer.node);
  rendermime.latexTypesetter?.typeset(renderer.node);
}
