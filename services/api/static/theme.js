/** Light, dark, or as the system has it. */

import {at} from './dom.js';

const KEY = 'leeway-theme';

/** Follow the choice; `onChange` is called whenever the colours have changed. */
export function followTheme(onChange) {
  const select = at('theme');
  const apply = () => {
    if (select.value === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = select.value;
    onChange();
  };
  const kept = localStorage.getItem(KEY);
  select.value = ['light', 'dark'].includes(kept) ? kept : 'auto';
  select.addEventListener('change', () => {
    localStorage.setItem(KEY, select.value);
    apply();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', onChange);
  apply();
}
