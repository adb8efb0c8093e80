// Send a message to the kernel; false if nothing can be sent: a notebook takes a widget's comm away when the kernel is
// restarted.
export function send(model, content) {
  try {
    model.send(content);
    return true;
  } catch {
    return false;
  }
}
