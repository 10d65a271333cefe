// Runs the script of a plan's page in a document that only remembers, moves every slider everywhere and chooses every
// plan. What is no number, or not there, must reach no text and no attribute.
"use strict";

const fs = require("fs");

function checked(what) {
  if (/NaN|undefined|Infinity/.test(String(what))) throw new Error(`the page shows ${what}`);
  return what;
}

class Node {
  constructor() {
    Object.assign(this, {children: [], style: {}, listeners: {}, hidden: false, words: "", classList: {toggle() {}}});
  }
  append(...nodes) { this.children.push(...nodes); }
  prepend(...nodes) { this.children.unshift(...nodes); }
  replaceChildren() { this.children = []; }
  remove() {}
  setAttribute(name, value) { checked(value); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  set textContent(words) { this.words = checked(words); }
  get textContent() { return this.words; }
}

const nodes = {};
global.document = {
  body: {clientWidth: 1000},
  getElementById: id => nodes[id] ??= new Node(),
  createElement: () => new Node(),
  createElementNS: () => new Node(),
};
const script = fs.readFileSync(process.argv[2], "utf8").split("<script>")[1].split("</script>")[0];
const page = new Function(`${script}\nreturn {axes, PLAN, shown, amount};`)();

let places = 0;
function move(index) {
  if (index === page.axes.length) {
    places += 1;
    if (page.shown() !== page.PLAN.grid[places - 1]) throw new Error(`place ${places} shows another's figures`);
    return;
  }
  for (let at = 0; at < page.axes[index].values.length; at += 1) {
    page.axes[index].range.value = at;
    page.axes[index].range.listeners.input();
    move(index + 1);
  }
}
move(0);
for (const plan of page.PLAN.plans) {
  plan.row?.listeners.click();
  if (plan.row && page.shown() !== plan) throw new Error("a chosen plan is not what is shown");
}
for (const [tokens, price] of [["1.5e12", "2"], ["160B", ""], ["junk", "junk"]]) {
  nodes.tokens.value = tokens;
  nodes.price.value = price;
  nodes.tokens.listeners.input();
}
for (const [text, value] of [["160B", 1.6e11], ["1,500", 1500], ["1.5e12", 1.5e12], ["2.5", 2.5], ["2,50", NaN]]) {
  if (!Object.is(page.amount(text), value)) throw new Error(`${text} is read as ${page.amount(text)}`);
}
nodes.reset.listeners.click();
console.log(places);
