/** The form of settings that may be changed while the run goes on, for who may control it. */

import {confirmed} from './controls.js';
import {at, make, place, say} from './dom.js';
import {plural} from './format.js';

const ASK_AGAIN_MS = 2000;
/** As long as a step may take; then the page stops asking who goes by the change. */
const APPLY_TIMEOUT_MS = 600_000;

export class Settings {
  constructor() {
    this.client = null;
    /** The body of v1/settings, null before it was read. */
    this.known = null;
    this.tag = null;
    /** Counts what is watched, so that only the newest change is. */
    this.watch = 0;
    this.isSending = false;
    at('settings').addEventListener('toggle', () => this.refresh());
    at('settings-form').addEventListener('input', () => this.look());
    at('settings-form').addEventListener('submit', event => {
      event.preventDefault();
      this.send();
    });
    at('settings-form').addEventListener('reset', event => {
      event.preventDefault();
      this.fill();
      this.accept();
    });
  }

  /** The API has said what the token may; `controls.js` shows the card that holds this. */
  allow(client) {
    this.client = client;
    this.refresh();
  }

  /** Another run is served here now. */
  clear() {
    this.client = this.known = null;
    this.watch += 1;
    place(at('settings-rows'));
    this.tell('', '');
  }

  /** Somebody has changed them, or the form has been opened: what is being typed stays. */
  async refresh() {
    if (!at('settings').open || this.client?.scope !== 'control') return;
    try {
      const wasKnown = this.known !== null;
      this.take(await this.client.getTagged('settings'));
      if (!wasKnown) this.accept();
    } catch (error) {
      this.tell(`The settings cannot be read: ${error.message}`);
    }
  }

  take({body, tag}) {
    const typed = this.known === null ? new Map() : this.typed();
    this.known = body;
    this.tag = tag;
    const isOther = at('settings-rows').childElementCount !== body.settings.length;
    if (isOther) place(at('settings-rows'), ...body.settings.map(row));
    this.fill(typed);
    this.showApplied();
  }

  /** The fields that differ from what stands, with their text. */
  typed() {
    const found = new Map();
    for (const {key, value} of this.known.settings) {
      const text = fieldOf(key).value.trim();
      if (text !== String(value)) found.set(key, text);
    }
    return found;
  }

  /** Put what stands into the fields, or what was typed instead. */
  fill(typed = new Map()) {
    for (const setting of this.known?.settings ?? []) {
      const field = fieldOf(setting.key);
      field.value = typed.get(setting.key) ?? String(setting.value);
      say(at(noteId(setting.key)), noteOf(setting));
    }
    this.look();
  }

  look() {
    const num = this.known === null ? 0 : this.typed().size;
    at('settings-apply').disabled = num === 0 || this.isSending;
    at('settings-undo').disabled = num === 0 || this.isSending;
    say(at('settings-apply'), num ? `Change ${plural(num, 'setting')}` : 'Change');
  }

  async send() {
    const typed = this.typed();
    if (typed.size === 0 || this.isSending) return;
    const values = Object.fromEntries([...typed].map(([key, text]) => [key, Number(text)]));
    const bad = [...typed].find(([key, text]) => text === '' || !Number.isFinite(values[key]));
    if (bad) return this.refuse(`${bad[0]} needs a number, such as 0.0001`);
    if (!(await confirmed(this.question(typed)))) return;
    this.isSending = true;
    this.look();
    try {
      this.adopt(await this.client.patch('settings', {values}, this.tag));
    } catch (error) {
      await this.failed(error);
    } finally {
      this.isSending = false;
      this.look();
    }
  }

  question(typed) {
    const old = new Map(this.known.settings.map(({key, value}) => [key, value]));
    const changes = [...typed].map(([key, text]) => `${key} from ${old.get(key)} to ${text}`);
    return {
      title: `Change ${plural(typed.size, 'setting')}?`,
      does: 'Change',
      text: `${changes.join('; ')}. The learner goes by it from its next step on, the rollouts
        within seconds.`,
    };
  }

  adopt(answer) {
    this.known = answer.body;
    this.tag = answer.tag;
    this.fill();
    this.accept();
    this.followApplied();
  }

  /** Somebody else was faster, or the API refuses a value: what was typed stays. */
  async failed(error) {
    if (error.status === 412) await this.refresh();
    this.refuse(error.message);
  }

  refuse(text) {
    this.mark(key => text.includes(key));
    this.tell(text);
  }

  /** No field is wrong any more. */
  accept() {
    this.mark(() => false);
    this.tell('');
  }

  mark(isWrong) {
    for (const {key} of this.known?.settings ?? []) {
      if (isWrong(key)) fieldOf(key).setAttribute('aria-invalid', 'true');
      else fieldOf(key).removeAttribute('aria-invalid');
    }
  }

  tell(problem, state) {
    say(at('settings-problem'), problem);
    if (state !== undefined) say(at('settings-state'), state);
  }

  /** Ask until everybody goes by the change. */
  async followApplied() {
    this.watch += 1;
    const number = this.watch;
    const until = Date.now() + APPLY_TIMEOUT_MS;
    this.showApplied();
    while (!this.known.is_applied && Date.now() < until) {
      await new Promise(resolve => setTimeout(resolve, ASK_AGAIN_MS));
      if (number !== this.watch) return;
      try {
        const {body, tag} = await this.client.getTagged('settings');
        if (number !== this.watch) return;
        this.take({body, tag});
      } catch (error) {
        say(at('settings-state'), `Whether it is applied is not known: ${error.message}`);
      }
    }
  }

  showApplied() {
    const {revision, applied, is_applied: isApplied} = this.known;
    const late = Object.keys(applied).filter(name => applied[name] < revision);
    const text =
      revision === 0
        ? 'Nothing was changed yet.'
        : isApplied
          ? `Change ${revision}: everybody goes by it.`
          : `Change ${revision}: waiting for ${late.join(', ')}.`;
    say(at('settings-state'), text);
  }
}

const fieldId = key => `setting-${key.replaceAll('.', '-')}`;
const noteId = key => `${fieldId(key)}-note`;
const fieldOf = key => at(fieldId(key));

function row({key, text, is_whole: isWhole}) {
  const textId = `${fieldId(key)}-text`;
  return make(
    'div',
    {class: 'setting'},
    make('label', {for: fieldId(key)}, ...breakable(key)),
    make('input', {
      id: fieldId(key),
      type: 'text',
      inputmode: isWhole ? 'numeric' : 'decimal',
      autocomplete: 'off',
      spellcheck: 'false',
      'aria-describedby': `${textId} ${noteId(key)}`,
    }),
    make(
      'p',
      {},
      make('span', {id: textId, class: 'quiet'}, `${text} `),
      make('span', {id: noteId(key), class: 'note'}),
    ),
  );
}

/** A key that may be broken behind its dots and underscores. */
const breakable = key =>
  key.split(/(?<=[._])/).flatMap((part, i) => (i ? [make('wbr'), part] : [part]));

/** What may stand in the field, and what stood there at the start. */
function noteOf(setting) {
  const {value, started_with: first} = setting;
  const bounds = boundsOf(setting);
  const began = value === first ? '' : `, began with ${first}`;
  return `${bounds[0].toUpperCase()}${bounds.slice(1)}${began}.`;
}

/** "a whole number, at least 1"; "above 0, at most 1"; "any number". */
export function boundsOf({minimum, maximum, is_minimum_allowed: isAllowed, is_whole: isWhole}) {
  const parts = [
    isWhole ? 'a whole number' : null,
    minimum === null ? null : `${isAllowed ? 'at least' : 'above'} ${minimum}`,
    maximum === null ? null : `at most ${maximum}`,
  ].filter(Boolean);
  return parts.join(', ') || 'any number';
}
