/** Buttons that steer the run. Every one asks first. */

import {at, make, say} from './dom.js';

const ASK_AGAIN_MS = 2000;

const ACTIONS = [
  {
    name: 'pause',
    label: 'Pause',
    title: 'Pause the rollouts?',
    does: 'Pause',
    text:
      'No new group is admitted. Groups in play are played to their end, and the learner trains' +
      ' what is buffered, then waits.',
  },
  {
    name: 'resume',
    label: 'Resume',
    title: 'Resume the rollouts?',
    does: 'Resume',
    text: 'New groups are admitted again.',
  },
  {
    name: 'checkpoint',
    label: 'Checkpoint',
    title: 'Write a checkpoint now?',
    does: 'Write it',
    text: 'The learner writes it after the step it is in.',
  },
  {
    name: 'publish',
    label: 'Publish',
    title: 'Publish the weights now?',
    does: 'Publish',
    text:
      'After the step it is in, the learner sends its version to every engine. Generation' +
      ' pauses for a moment.',
  },
  {
    name: 'drain',
    label: 'Drain and end',
    title: 'Drain and end this run?',
    does: 'Drain and end',
    isDanger: true,
    text:
      'No new group is admitted, what is left is trained, a checkpoint is written, and the run' +
      ' ends as if its last step were done. It can be resumed.',
  },
];

export class Controls {
  constructor() {
    this.client = null;
    /** Names of the actions that are under way. */
    this.busy = new Set();
    this.buttons = new Map(
      ACTIONS.map(action => {
        const button = make('button', {type: 'button'}, action.label);
        button.addEventListener('click', () => this.ask(action));
        return [action.name, button];
      }),
    );
    at('control-buttons').append(...this.buttons.values());
  }

  /** Show the buttons to who may use them, as the API has said of the token. */
  allow(client) {
    this.client = client;
    at('controls').hidden = client.scope !== 'control';
  }

  show({run, replay}) {
    const isOver = ['evaluating-after', 'done'].includes(run.phase);
    const isPaused = Boolean(replay?.admission_paused);
    for (const [name, button] of this.buttons) {
      const isIdle = name === 'pause' ? isPaused : name === 'resume' ? !isPaused : false;
      button.disabled = this.busy.has(name) || isOver || isIdle;
    }
  }

  async ask(action) {
    if (!(await confirmed(action))) return;
    const told = text => say(at('control-answer'), `${action.label}: ${text}`);
    this.busy.add(action.name);
    this.buttons.get(action.name).disabled = true;
    told('asked …');
    try {
      let answer = await this.client.post(`control/${action.name}`);
      // The learner takes it up between two steps.
      while (isOpen(answer)) {
        told(answer.detail);
        await new Promise(resolve => setTimeout(resolve, ASK_AGAIN_MS));
        answer = await stateOf(this.client, action, answer);
      }
      told(answer.state === 'done' ? answer.detail : `${answer.state}: ${answer.detail}`);
    } catch (error) {
      told(`failed: ${error.message}`);
    } finally {
      this.busy.delete(action.name);
      this.buttons.get(action.name).disabled = false;
    }
  }
}

/** Where a request stands now. What cannot be read at the moment stands where it stood. */
async function stateOf(client, action, before) {
  try {
    return await client.get(`control/${action.name}`);
  } catch (error) {
    if (!error.isPassing) throw error;
    return before;
  }
}

/** Neither done nor failed; the API lets every request expire. */
const isOpen = ({state}) => state === 'waiting' || state === 'working';

/** Ask in a dialog; the answer that changes nothing has the focus. */
export function confirmed({title, text, does, isDanger}) {
  const dialog = at('confirm-dialog');
  say(at('confirm-title'), title);
  say(at('confirm-text'), text);
  say(at('confirm-yes'), does);
  at('confirm-yes').classList.toggle('danger', Boolean(isDanger));
  dialog.returnValue = 'no';
  dialog.showModal();
  at('confirm-no').focus();
  return new Promise(resolve => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === 'yes'), {once: true});
  });
}
