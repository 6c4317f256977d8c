"""The page of trajectory_html.py: markup, style and script. The script makes text nodes only."""

from __future__ import annotations

from typing import Final

PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1 id="title"></h1><dl id="facts"></dl><p id="note"></p></header>
<div class="controls">
<fieldset id="colours"><legend>Colour by</legend></fieldset>
<div id="legend"></div>
</div>
<div class="columns">
<nav aria-label="Trajectories">
<div class="filters">
<input id="search" type="search" placeholder="Question, answer, id" aria-label="Filter">
<select id="verdict" aria-label="Which"></select>
</div>
<p id="count" aria-live="polite"></p>
<ol id="list"></ol>
</nav>
<main id="episode" tabindex="-1"><noscript>This page draws itself with the script inside it; allow
scripts for this file to read it.</noscript></main>
</div>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

STYLE: Final = """
:root { color-scheme: light dark;
  --paper: #fbfaf8; --card: #fff; --ink: #1c2328; --muted: #626b73; --rule: #e2e0da;
  --good: #15704f; --bad: #ad3630; --mark: #1769aa; --quiet: #f3f1ec;
  --turn0: #cfe3f6; --turn1: #fbe0bf; --turn2: #d8ecd2; --turn3: #ead7f2; --turn4: #f9d5d3;
  --turn5: #cdebe8;
  --version0: #dfe3ee; --version1: #c6d8f0; --version2: #b4dcea; --version3: #b8e4d3;
  --version4: #d3e8b4; --version5: #f1e4a0; --version6: #f9cb95; --version7: #f5aca0;
  --ratio0: #7fb2ea; --ratio1: #b3d2f4; --ratio2: #dbe9f9; --ratio3: transparent;
  --ratio4: #fbe3c8; --ratio5: #f8c08c; --ratio6: #ef8f63; --trained: #cfe9d6; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181b; --card: #1b2024; --ink: #e6e9eb; --muted: #9aa4ac; --rule: #2d343a;
  --good: #5fd0a2; --bad: #f08a83; --mark: #7dbcf0; --quiet: #171c1f;
  --turn0: #1f4263; --turn1: #5a4018; --turn2: #29492a; --turn3: #47315a; --turn4: #5a2f30;
  --turn5: #1c4a4a;
  --version0: #33394a; --version1: #28456b; --version2: #1f4f63; --version3: #1d5347;
  --version4: #3b5523; --version5: #5c5116; --version6: #6b421a; --version7: #74312b;
  --ratio0: #2a5f9e; --ratio1: #264a72; --ratio2: #22364a; --ratio3: transparent;
  --ratio4: #47361f; --ratio5: #6e471e; --ratio6: #93431f; --trained: #244a33; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header, .controls { padding: 16px 24px 0; }
h1 { margin: 0; font-size: 22px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
p { margin: 0; } #note { color: var(--muted); font-size: 13px; } #note:empty { display: none; }
#facts { display: flex; flex-wrap: wrap; gap: 4px 28px; margin: 10px 0 4px; }
#facts:empty { display: none; } dt { color: var(--muted); font-size: 12px; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.controls { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 24px;
  padding-bottom: 14px; border-bottom: 1px solid var(--rule); }
fieldset { border: 0; margin: 0; padding: 0; display: flex; gap: 14px; font-size: 14px; }
fieldset legend { float: left; color: var(--muted); padding: 0; margin-right: 2px; }
fieldset label { cursor: pointer; } fieldset label.off { color: var(--muted); cursor: default; }
fieldset input { accent-color: var(--mark); margin: 0 5px 0 0; }
#legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--muted); }
#legend i { display: inline-block; width: 14px; height: 14px; border-radius: 3px;
  vertical-align: -2px; margin-right: 5px; border: 1px solid var(--rule); }
.columns { display: grid; grid-template-columns: minmax(220px, 320px) minmax(0, 1fr); }
nav { border-right: 1px solid var(--rule); position: sticky; top: 0; height: 100vh;
  display: flex; flex-direction: column; }
.filters { display: flex; gap: 8px; padding: 12px 12px 6px 24px; }
.filters input { flex: 1; min-width: 0; }
.filters input, .filters select { font: inherit; font-size: 13px; padding: 4px 6px;
  color: var(--ink); background: var(--card); border: 1px solid var(--rule); border-radius: 5px; }
#count { padding: 0 12px 6px 24px; color: var(--muted); font-size: 12px; }
#list { list-style: none; margin: 0; padding: 0 0 24px; overflow: auto; flex: 1; }
#list button { all: unset; box-sizing: border-box; display: block; width: 100%; cursor: pointer;
  padding: 8px 12px 8px 20px; border-left: 4px solid transparent; font-size: 13.5px;
  overflow-wrap: anywhere; }
#list button:hover { background: var(--quiet); }
#list button:focus-visible { outline: 2px solid var(--mark); outline-offset: -2px; }
#list button[aria-current="true"] { background: var(--card); border-left-color: var(--mark); }
#list small { display: block; color: var(--muted); font-size: 12px; }
.right { color: var(--good); font-weight: 600; } .wrong { color: var(--bad); font-weight: 600; }
main { padding: 18px 28px 64px; max-width: 1020px; outline: 0; }
main h2 { margin: 0 0 4px; font-size: 19px; overflow-wrap: anywhere; }
.facts { color: var(--muted); font-size: 13px; overflow-wrap: anywhere; }
.facts b { color: var(--ink); font-weight: 600; }
.block { margin-top: 14px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 7px; overflow: hidden; }
.block > h3, summary { margin: 0; padding: 7px 14px; font-size: 13px; font-weight: 600;
  background: var(--quiet); }
.block h3 span, summary { color: var(--muted); font-weight: 400; }
summary { cursor: pointer; border-top: 1px solid var(--rule); }
.block > summary { border-top: 0; }
pre { margin: 0; padding: 10px 14px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  unicode-bidi: plaintext; }
pre.untrained { color: var(--muted); }
pre span { border-radius: 3px; padding: 2px 0; }
pre span:hover { outline: 1px solid var(--mark); }
pre span.part::before { content: "\\25CC"; color: var(--muted); }
.turn0 { background: var(--turn0); } .turn1 { background: var(--turn1); }
.turn2 { background: var(--turn2); } .turn3 { background: var(--turn3); }
.turn4 { background: var(--turn4); } .turn5 { background: var(--turn5); }
.version0 { background: var(--version0); } .version1 { background: var(--version1); }
.version2 { background: var(--version2); } .version3 { background: var(--version3); }
.version4 { background: var(--version4); } .version5 { background: var(--version5); }
.version6 { background: var(--version6); } .version7 { background: var(--version7); }
.ratio0 { background: var(--ratio0); } .ratio1 { background: var(--ratio1); }
.ratio2 { background: var(--ratio2); } .ratio3 { background: var(--ratio3); }
.ratio4 { background: var(--ratio4); } .ratio5 { background: var(--ratio5); }
.ratio6 { background: var(--ratio6); } .trained { background: var(--trained); }
.error { margin-top: 14px; padding: 12px 14px; border: 1px solid var(--bad); border-radius: 7px;
  color: var(--bad); overflow-wrap: anywhere; }
#tip { position: fixed; z-index: 2; max-width: 340px; padding: 7px 10px; font-size: 12.5px;
  background: var(--ink); color: var(--paper); border-radius: 6px; pointer-events: none;
  white-space: pre-line; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
@media (max-width: 760px) { .columns { display: block; } nav { position: static; height: auto;
  border-right: 0; border-bottom: 1px solid var(--rule); } #list { max-height: 38vh; }
  main { padding: 16px; } .filters, #count { padding-left: 16px; } #list button {
  padding-left: 12px; } header, .controls { padding-left: 16px; padding-right: 16px; } }
"""

SCRIPT: Final = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const at = id => document.getElementById(id);
function make(name, text, kind) {
  const node = document.createElement(name);
  if (text !== undefined && text !== null) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}
const hasRatios = data.episodes.some(e => e.ratios);
const colours = {turn: 'turn', trained: 'trained tokens', version: 'policy version',
  ratio: 'ratio'};
let colourBy = data.colour_by, shown = [], current = null, tokens = [];

function versionBin(v) { return data.version_bins.findIndex(b => v <= b[1]); }
function ratioBin(r) { return data.ratio_edges.filter(edge => r >= edge).length; }
function colourOf(token) {
  if (token.turn === null || !token.trained) return '';
  if (colourBy === 'turn') return 'turn' + token.turn % 6;
  if (colourBy === 'trained') return 'trained';
  if (colourBy === 'version') return 'version' + versionBin(token.version);
  return token.ratio === null ? '' : 'ratio' + ratioBin(token.ratio);
}

function drawHead() {
  at('title').textContent = data.title;
  at('note').textContent = data.note;
  for (const fact of data.facts) {
    const box = make('div');
    box.append(make('dt', fact.label), make('dd', fact.value));
    at('facts').append(box);
  }
  for (const [name, label] of Object.entries(colours)) {
    const box = make('label', null, name === 'ratio' && !hasRatios ? 'off' : '');
    const input = make('input');
    input.type = 'radio'; input.name = 'colour'; input.checked = name === colourBy;
    input.disabled = name === 'ratio' && !hasRatios;
    if (input.disabled) box.title = 'Needs a model: leeway trajectories show --model DIR';
    input.addEventListener('change', () => { colourBy = name; drawLegend(); recolour(); });
    box.append(input, label);
    at('colours').append(box);
  }
  const states = [['all', 'all'], ['wrong', 'wrong'], ['right', 'right'], ['error', 'not played']];
  for (const [value, label] of states) {
    const option = make('option', label); option.value = value; at('verdict').append(option);
  }
  at('search').addEventListener('input', drawList);
  at('verdict').addEventListener('change', drawList);
}

function drawLegend() {
  const entries = [];
  if (colourBy === 'turn') {
    const most = Math.max(1, ...data.episodes.map(e => e.turns.length));
    for (let k = 0; k < Math.min(most, 6); k++) entries.push(['turn' + k, 'turn ' + (k + 1)]);
  } else if (colourBy === 'trained') entries.push(['trained', 'generated, trained']);
  else if (colourBy === 'version') data.version_bins.forEach(([low, high], i) =>
    entries.push(['version' + i, low === high ? 'version ' + low : low + '\\u2013' + high]));
  else data.ratio_labels.forEach((label, i) => entries.push(['ratio' + i, label]));
  entries.push(['', 'prompt and observed, not trained']);
  at('legend').replaceChildren(...entries.map(([kind, label]) => {
    const box = make('span'); box.append(make('i', null, kind), label); return box;
  }));
}

function stateOf(e) { return e.error !== null ? 'error' : e.is_failed ? 'wrong' : 'right'; }
function titleOf(e) { return e.question || e.question_id; }
function drawList() {
  const words = at('search').value.toLowerCase(), verdict = at('verdict').value;
  shown = data.episodes.map((e, i) => i).filter(i => {
    const e = data.episodes[i];
    const text = [e.question, e.question_id, e.group_id, e.trajectory_id, e.data_source,
      ...e.golden_answers].join('\\n').toLowerCase();
    return (verdict === 'all' || verdict === stateOf(e)) && text.includes(words);
  });
  at('count').textContent = shown.length + ' of ' + data.episodes.length;
  at('list').replaceChildren(...shown.map(listItem));
  if (!shown.includes(current)) select(shown.length ? shown[0] : null);
}
function listItem(i) {
  const e = data.episodes[i], item = make('li'), button = make('button', titleOf(e));
  const small = make('small'), state = stateOf(e);
  const word = {error: 'not played', wrong: 'wrong', right: 'right'}[state];
  small.append(make('span', word, state === 'right' ? 'right' : 'wrong'));
  if (e.error === null) small.append(' \\u00b7 ' + e.turns.length +
    (e.turns.length === 1 ? ' turn' : ' turns') + ' \\u00b7 ' + e.stop_reason);
  if (e.data_source) small.append(' \\u00b7 ' + e.data_source);
  button.type = 'button';
  button.setAttribute('aria-current', String(i === current));
  button.addEventListener('click', () => select(i));
  button.append(small); item.append(button);
  return item;
}
function select(i) {
  current = i;
  shown.forEach((j, place) => {
    const button = at('list').children[place].firstChild;
    button.setAttribute('aria-current', String(j === i));
    if (j === i) button.scrollIntoView({block: 'nearest'});
  });
  if (i !== null) history.replaceState(null, '', '#' + (i + 1));
  drawEpisode();
}

function drawEpisode() {
  hideTip(); tokens = [];
  const page = at('episode');
  if (current === null) { page.replaceChildren(make('p', 'No trajectory is like that.')); return; }
  const e = data.episodes[current], parts = [make('h2', titleOf(e))];
  if (e.golden_answers.length) {
    const line = make('p', 'Right: ', 'facts');
    line.append(make('b', e.golden_answers.join(' or '))); parts.push(line);
  }
  if (e.error !== null) {
    parts.push(make('p', 'Question ' + e.question_id, 'facts'), make('p', e.error, 'error'));
    page.replaceChildren(...parts); return;
  }
  const facts = make('p', null, 'facts'), state = stateOf(e);
  facts.append(make('span', state, state), ' \\u00b7 reward ' + round(e.reward) +
    ' \\u00b7 ended by ' + e.stop_reason + ' \\u00b7 ' + e.token_ids.length + ' tokens, ' +
    e.logprobs.length + ' trained \\u00b7 ' + e.duration_s.toFixed(1) + ' s');
  const ids = make('p', 'Question ' + e.question_id + ' \\u00b7 trajectory ' + e.trajectory_id,
    'facts');
  const scores = Object.entries(e.scores).map(([name, value]) => name + ' ' + round(value));
  parts.push(facts, ids, make('p', scores.join(' \\u00b7 '), 'facts'));
  const first = e.turns.length ? e.turns[0].start : e.token_ids.length;
  const prompt = foldable('Prompt, ' + first + ' tokens, not trained', 'block');
  prompt.open = true;
  prompt.append(run(e, 0, first, null, null)); parts.push(prompt);
  let trained = 0;
  e.turns.forEach((turn, k) => {
    const block = make('section', null, 'block'), end = turn.start + turn.num_generated;
    const head = make('h3', 'Turn ' + (k + 1) + ': ' + turn.action + ' ');
    const versions = e.versions.slice(trained, trained + turn.num_generated);
    head.append(make('span', turn.num_generated + ' tokens generated' + span(versions) +
      (turn.reward === null ? '' : ' \\u00b7 reward ' + round(turn.reward))));
    block.append(head, run(e, turn.start, end, k, trained));
    if (turn.num_observed) {
      const observed = foldable('Observed, ' + turn.num_observed + ' tokens, not trained');
      observed.open = true;
      observed.append(run(e, end, end + turn.num_observed, k, null)); block.append(observed);
    }
    trained += turn.num_generated; parts.push(block);
  });
  page.replaceChildren(...parts); page.scrollTop = 0; recolour();
}
function foldable(title, kind) {
  const box = make('details', null, kind); box.append(make('summary', title)); return box;
}
function span(versions) {
  if (!versions.length) return '';
  const low = Math.min(...versions), high = Math.max(...versions);
  return low === high ? ' \\u00b7 version ' + low : ' \\u00b7 versions ' + low + ' to ' + high;
}
function round(x) { return String(Math.round(x * 1e4) / 1e4); }
function run(e, start, stop, turn, trained) {
  const pre = make('pre', null, trained === null ? 'untrained' : '');
  for (let i = start; i < stop; i++) {
    const node = make('span', e.texts[i]), t = trained === null ? null : trained + i - start;
    node.dataset.i = tokens.length;
    tokens.push({node, i, turn, trained: t !== null, id: e.token_ids[i], text: e.texts[i],
      logprob: t === null ? null : e.logprobs[t], version: t === null ? null : e.versions[t],
      ratio: t === null || !e.ratios ? null : e.ratios[t]});
    pre.append(node);
  }
  return pre;
}
function recolour() {
  for (const token of tokens)
    token.node.className = colourOf(token) + (token.text === '' && token.trained ? ' part' : '');
}

function tipOf(token) {
  const lines = [JSON.stringify(token.text), 'id ' + token.id + ', place ' + token.i];
  if (token.text === '') lines.push('part of a character that ends in a later token');
  if (!token.trained) lines.push(token.turn === null ? 'prompt, not trained' :
    'observed after turn ' + (token.turn + 1) + ', not trained');
  else {
    lines.push('turn ' + (token.turn + 1) + ', version ' + token.version);
    lines.push('log-prob ' + token.logprob + ' (p ' + Math.exp(token.logprob).toPrecision(3) + ')');
    if (token.ratio !== null) lines.push('ratio ' + token.ratio);
  }
  return lines.join('\\n');
}
function hideTip() { at('tip').hidden = true; }
function showTip(event) {
  const node = event.target.closest ? event.target.closest('pre span') : null, tip = at('tip');
  if (!node) { hideTip(); return; }
  tip.textContent = tipOf(tokens[Number(node.dataset.i)]); tip.hidden = false;
  const box = node.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = box.bottom + 6 + size.height < innerHeight;
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - size.width - 8)) + 'px';
  tip.style.top = (below ? box.bottom + 6 : Math.max(8, box.top - size.height - 6)) + 'px';
}
at('episode').addEventListener('mouseover', showTip);
at('episode').addEventListener('click', showTip);
addEventListener('scroll', hideTip, {passive: true});
addEventListener('keydown', event => {
  if (event.target.matches('input, select') || event.ctrlKey || event.metaKey || event.altKey)
    return;
  const step = {j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1}[event.key];
  const place = shown.indexOf(current) + (step || 0);
  if (step && place >= 0 && place < shown.length) select(shown[place]);
});
drawHead(); drawLegend();
const wanted = Number(location.hash.slice(1)) - 1;
if (data.episodes[wanted]) current = wanted;
drawList(); select(current);
"""
