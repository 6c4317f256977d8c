/** The list of events. */

import {at, make, place} from './dom.js';
import {clock} from './format.js';

/** Draw events, newest first. */
export function showEvents(events) {
  if (!events.length) {
    place(at('events'), make('li', {class: 'empty'}, 'No event yet.'));
    return;
  }
  place(
    at('events'),
    ...events.map(event => {
      const when = new Date(event.time_s * 1000);
      return make(
        'li',
        {},
        make(
          'time',
          {datetime: when.toISOString(), title: when.toLocaleString('en-GB')},
          clock(event.time_s),
        ),
        make('span', {class: 'kind'}, event.kind),
        make('span', {}, event.text),
      );
    }),
  );
}
