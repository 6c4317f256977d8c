/** The page: reads the run once, then follows its events, and draws what changed. */

import {buildPanels} from './panels.js';
import {Controls} from './controls.js';
import {at, say} from './dom.js';
import {showEvents} from './events.js';
import {duration} from './format.js';
import {drawLoop} from './loop.js';
import {showBuffer, showEngines, showProgress, showTiles, showWaits} from './overview.js';
import {Session} from './session.js';
import {Settings} from './settings.js';
import {Store} from './store.js';
import {Sweeps} from './sweeps.js';
import {followTheme} from './theme.js';
import {forgetToken, keepToken, readToken} from './token.js';
import {Trajectories} from './trajectories.js';
import {showWatch} from './watch.js';

const STEPS_AT_ONCE = 1000;

const store = new Store();
const panels = buildPanels();
const trajectories = new Trajectories();
const controls = new Controls();
const settings = new Settings();
const sweeps = new Sweeps();
let lastId = '';
let session = null;
let isDrawing = false;
const changed = new Set();

// --- drawing, at most once per frame ---

function redraw(...parts) {
  for (const part of parts) changed.add(part);
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    const now = new Set(changed);
    changed.clear();
    if (now.has('status')) drawStatus();
    if (now.has('steps')) for (const panel of panels) panel.show(store);
    if (now.has('events')) showEvents(store.events);
  });
}

function drawStatus() {
  showProgress(store.status);
  showTiles(store.status);
  drawLoop(at('loop'), store.status);
  showWaits(store.status);
  showWatch(store.status);
  showEngines(store.status);
  showBuffer(store.status);
  controls.show(store.status);
}

// --- reading ---

async function load(client) {
  const status = await client.get('status');
  takeStatus(status);
  // The run went back to a checkpoint while nobody looked: read all steps again.
  if (store.lastStep?.step > status.run.step) store.steps = [];
  controls.allow(client);
  settings.allow(client);
  sweeps.allow(client);
  await loadHeldOut(client);
  await loadSteps(client);
  await trajectories.load(client);
}

/** The status tells the last evaluation alone. */
async function loadHeldOut(client) {
  const {eval: heldOut} = await client.get('learner');
  store.takeHeldOut(heldOut.history);
}

async function loadSteps(client) {
  for (let after = store.lastStep?.step ?? 0; ;) {
    const page = await client.get('learner/steps', {cursor: after, limit: STEPS_AT_ONCE});
    for (const line of page.items) store.takeStep(line);
    redraw('steps');
    if (page.next === null) return;
    after = page.next;
  }
}

function takeStatus(status) {
  const before = [store.status.staleness.bound, store.heldOut.size];
  if (store.takeStatus(status)) {
    // Another run is served here now: begin anew, with its records.
    trajectories.clear();
    settings.clear();
    lastId = '';
    redraw('status', 'steps', 'events');
    start(session.client.token);
    return;
  }
  // Most of them change nothing that the charts draw.
  if ([status.staleness.bound, store.heldOut.size].some((value, i) => value !== before[i])) {
    redraw('steps');
  }
  redraw('status');
}

const TAKE = {
  status: takeStatus,
  step: line => {
    store.takeStep(line);
    redraw('steps');
  },
  event: event => {
    store.takeEvent(event);
    if (event.kind === 'settings') settings.refresh();
    redraw('events');
  },
  trajectory: item => trajectories.arrive(item),
};

function take({id, type, data}) {
  if (id) lastId = id;
  TAKE[type]?.(JSON.parse(data));
}

// --- the connection ---

const WORDS = {
  connecting: 'connecting',
  live: 'live',
  waiting: 'reconnecting',
  gone: 'not reachable',
  refused: 'no access',
};

function showConnection(state, {error, inS} = {}) {
  const isGone = state === 'waiting' && error.isGone;
  at('connection').dataset.state = isGone ? 'gone' : state;
  say(at('connection'), WORDS[isGone ? 'gone' : state]);
  if (state === 'live') hideBanner();
  if (state !== 'waiting') return;
  const what = isGone
    ? `The API cannot be reached: ${error.message}.`
    : `The API says: ${error.message}.`;
  const rest = store.isKnown ? ' What you see is the last known state.' : '';
  showBanner(`${what} Trying again in ${duration(inS)}.${rest}`, 'waiting');
}

function showBanner(text, kind = 'bad') {
  at('banner').dataset.kind = kind;
  say(at('banner'), text);
  at('banner').hidden = false;
}

function hideBanner() {
  at('banner').hidden = true;
}

/** Read the run, then follow it, until another token is given. */
function start(token) {
  session?.end();
  session = new Session(token, {
    load,
    onEvent: take,
    onState: showConnection,
    onRefused: error => refuse(error, token),
    // A page that has read no event begins with the first; it has the steps from the records.
    beginId: () => lastId || `0-0.${store.lastStep?.step ?? 0}`,
  });
  session.run();
}

function refuse(error, token) {
  showConnection('refused');
  if (token) forgetToken();
  askForToken(token ? `The API refused that token: ${error.message}` : '');
  showBanner('This page has no access to the run. Give it a token with the button above.');
}

function askForToken(problem) {
  say(at('token-problem'), problem);
  if (!at('token-dialog').open) at('token-dialog').showModal();
  at('token-input').focus();
}

at('token-form').addEventListener('submit', event => {
  event.preventDefault();
  const token = at('token-input').value.trim();
  if (!token) return;
  at('token-input').value = '';
  at('token-dialog').close();
  hideBanner();
  keepToken(token);
  start(token);
});
at('token-later').addEventListener('click', () => at('token-dialog').close());
at('change-token').addEventListener('click', () => askForToken(''));

followTheme(() => {
  for (const panel of panels) panel.recolour();
});
new ResizeObserver(() => redraw('status')).observe(at('content'));
redraw('status', 'steps', 'events');
start(readToken());
