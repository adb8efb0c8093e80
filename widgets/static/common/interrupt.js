// This module interrupts the kernel through the notebook's server, which works also while a cell runs.

const PATH = /^api\/kernels\/[\w-]+$/;

// Return the server's configuration, or null where the page is not a Jupyter server's.
function pageConfig() {
  const node = document.getElementById("jupyter-config-data");
  return node ? JSON.parse(node.textContent) : null;
}

// Return whether `interrupt(path)` can do anything here.
export function canInterrupt(path) {
  return PATH.test(path ?? "") && pageConfig() !== null;
}

// Interrupt the kernel, or throw an Error that says why that failed.
export async function interrupt(path) {
  const { baseUrl = "/", token } = pageConfig();
  const headers = { "Content-Type": "application/json" };
  const cookie = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie);
  if (cookie) headers["X-XSRFToken"] = decodeURIComponent(cookie[1]);
  if (token) headers.Authorization = `token ${token}`;
  const address = new URL(`${baseUrl.replace(/\/?$/, "/")}${path}/interrupt`, location.origin);
  if (address.origin !== location.origin) throw new Error(`${address.origin} is not this page's server`);
  const answer = await fetch(address, { method: "POST", headers, credentials: "same-origin" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status} ${answer.statusText}`.trim());
}
