// This script puts a button beside each output whose answer is being written; widgets/stop/widget.py describes the messages.
// The button is not in the output, which is replaced many times a second: it would lose the focus, and the click.
import { canInterrupt, interrupt } from "../common/interrupt.js";

const ANSWER_MS = 1000;
const MARK = "data-nbe-stream";
// An output and its place in JupyterLab and Notebook 7, and an output in VS Code.
const PLACES = ".jp-OutputArea-child, .output_container, .output";

class Stops {
  constructor(model) {
    this.model = model;
    this.buttons = new Map(); // the buttons of each stream, by their places
    this.pressed = new Map(); // the time-outs of the streams that are to end
    this.frame = null;
    // Many outputs may be replaced before the page is drawn again.
    this.observer = new MutationObserver(() => {
      this.frame ??= requestAnimationFrame(() => this.place());
    });
    this.onChange = () => this.changed();
    this.onMessage = (message) => this.answered(message);
    model.on("change:streams", this.onChange);
    model.on("msg:custom", this.onMessage);
    this.changed();
  }

  changed() {
    const streams = this.model.get("streams");
    for (const [key, buttons] of this.buttons) {
      if (key in streams) continue;
      for (const button of buttons.values()) remove(button);
      this.buttons.delete(key);
      clearTimeout(this.pressed.get(key));
      this.pressed.delete(key);
    }
    for (const key of Object.keys(streams)) if (!this.buttons.has(key)) this.buttons.set(key, new Map());
    this.observer.disconnect();
    if (this.buttons.size) this.observer.observe(document.body, { childList: true, subtree: true });
    this.place();
  }

  // Give each place of a marked output its button; a notebook may be open twice.
  place() {
    this.frame = null;
    for (const buttons of this.buttons.values()) {
      for (const [place, button] of buttons) {
        if (place.isConnected) continue;
        remove(button);
        buttons.delete(place);
      }
    }
    for (const mark of document.querySelectorAll(`[${MARK}]`)) {
      const key = mark.getAttribute(MARK);
      const buttons = this.buttons.get(key);
      const place = mark.closest(PLACES);
      if (!place || !buttons || buttons.has(place)) continue;
      const button = this.make(key);
      buttons.set(place, button);
      place.classList.add("nbe-has-stop");
      place.append(button);
    }
  }

  make(key) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "nbe-stop";
    button.textContent = "■ Stop";
    button.setAttribute("aria-label", "Stop this answer; what has been written stays");
    // A notebook takes keys for its shortcuts, and clicks for the choice of a cell.
    button.setAttribute("data-lm-suppress-shortcuts", "true");
    button.addEventListener("keydown", (event) => event.stopPropagation());
    button.addEventListener("mousedown", (event) => event.stopPropagation());
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      this.stop(key);
    });
    return button;
  }

  stop(key) {
    if (this.pressed.has(key)) return;
    this.pressed.set(
      key,
      setTimeout(() => this.unanswered(key), ANSWER_MS),
    );
    this.say(key, "stopping …");
    this.model.send({ kind: "stop", stream: key });
  }

  answered(message) {
    if (message?.kind === "stop") clearTimeout(this.pressed.get(message.stream));
  }

  // A busy kernel reads no messages: its server can interrupt it, which ends the answer that the running cell waits for.
  unanswered(key) {
    const isForeground = this.model.get("streams")[key];
    if (isForeground === undefined) return;
    const path = this.model.get("interrupt_path");
    if (!isForeground || !canInterrupt(path)) {
      this.say(key, "stops after the cell");
      return;
    }
    interrupt(path).catch((error) => this.say(key, `not stopped: ${error.message}`));
  }

  say(key, text) {
    for (const button of this.buttons.get(key)?.values() ?? []) {
      button.textContent = text;
      button.title = text;
      button.setAttribute("aria-disabled", "true");
    }
  }

  destroy() {
    this.model.off("change:streams", this.onChange);
    this.model.off("msg:custom", this.onMessage);
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    for (const timer of this.pressed.values()) clearTimeout(timer);
    for (const buttons of this.buttons.values()) for (const button of buttons.values()) remove(button);
  }
}

// The keyboard goes on from the cell where it was on the button; a click has chosen no cell.
function remove(button) {
  const hadFocus = button.matches(":focus-visible");
  const cell = button.closest("[tabindex]");
  button.closest(".nbe-has-stop")?.classList.remove("nbe-has-stop");
  button.remove();
  if (hadFocus) cell?.focus();
}

export default {
  initialize({ model }) {
    const stops = new Stops(model);
    return () => stops.destroy();
  },
};
