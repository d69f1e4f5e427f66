/* A browser gives a page that was opened as a file no workers. Search, the one thing that wants one, gets a frame instead. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      const load = (address) =>
        new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src: address, onload: done, onerror: failed });
          inner.document.head.append(script);
        });
      inner.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address);
      };
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner = load(url).then(() => inner);
    }
    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
