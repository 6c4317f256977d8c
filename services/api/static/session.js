/** One token's time with the API: read the run, then follow its events, until it is ended. */

import {ApiError, Client} from './client.js';
import {follow, pause, pauseOf} from './stream.js';

/** A page that nobody looks at lets go of its stream: a browser opens only six to one address. */
const HIDDEN_S = 60;

export class Session {
  /**
   * load(client): read the records, throw ApiError; beginId(): the id of the event to begin behind;
   * onEvent, onState as in `follow`; onRefused(error): the token is missing or wrong.
   */
  constructor(token, {load, beginId, onEvent, onState, onRefused}) {
    this.client = new Client(token);
    this.load = load;
    this.beginId = beginId;
    this.onEvent = onEvent;
    this.onState = onState;
    this.onRefused = onRefused;
    this.ended = new AbortController();
    this.following = null;
    this.resting = null;
    this.numReloads = 0;
    document.addEventListener('visibilitychange', () => this.rest(), {signal: this.ended.signal});
  }

  end() {
    this.ended.abort();
    this.following?.abort();
    clearTimeout(this.resting);
  }

  async run() {
    if (await this.loadAtLast()) await this.follow();
  }

  /** Until it has worked, with the pauses of the stream; false if the token is refused. */
  async loadAtLast() {
    const {signal} = this.ended;
    for (let failures = 0; !signal.aborted; failures += 1) {
      this.onState('connecting', {});
      const error = await this.problemOfLoad();
      if (signal.aborted) return false;
      if (error === null) return true;
      if (error.isRefused) {
        this.onRefused(error);
        return false;
      }
      const inS = error.retryAfterS ?? pauseOf(failures);
      this.onState('waiting', {error, inS});
      await pause(inS, signal);
    }
    return false;
  }

  async problemOfLoad() {
    try {
      await this.load(this.client);
      return null;
    } catch (error) {
      if (error instanceof ApiError) return error;
      console.error('the records are not shown', error);
      return new ApiError(500, `the page cannot show what it has read: ${error.message}`);
    }
  }

  async follow() {
    this.following = new AbortController();
    let wasLive = false;
    await follow({
      client: this.client,
      lastId: this.beginId(),
      signal: this.following.signal,
      onEvent: this.onEvent,
      onState: (state, more) => {
        if (state === 'refused') this.onRefused(more.error);
        else this.onState(state, more);
        // The stream may not hold all that was missed: the records do.
        if (state === 'live' && wasLive) this.reload();
        wasLive ||= state === 'live';
      },
    });
  }

  /** Read the records again beside the stream, until it has worked; a later reload takes over. */
  async reload() {
    const {signal} = this.following;
    this.numReloads += 1;
    const number = this.numReloads;
    for (let failures = 0; ; failures += 1) {
      const error = await this.problemOfLoad();
      if (error === null || signal.aborted || number !== this.numReloads) return;
      if (error.isRefused) {
        this.onRefused(error);
        return;
      }
      await pause(error.retryAfterS ?? pauseOf(failures), signal);
      if (signal.aborted || number !== this.numReloads) return;
    }
  }

  /** Let go of the stream of a page that has been hidden for a while, until it is seen again. */
  rest() {
    clearTimeout(this.resting);
    if (document.visibilityState === 'hidden') {
      this.resting = setTimeout(() => {
        if (this.following === null) return;
        this.following.abort();
        this.isAtRest = true;
      }, HIDDEN_S * 1000);
    } else if (this.isAtRest) {
      this.isAtRest = false;
      this.run();
    }
  }
}
