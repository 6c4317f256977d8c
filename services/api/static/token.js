/** The token of this tab: from the address once, then in the tab's session storage. */

const KEY = 'leeway-token';

/**
 * The token, or null. One in the fragment (`#token=...`) wins and is taken out of the address, so
 * that neither history nor a copied link holds it.
 */
export function readToken() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const given = fragment.get('token');
  if (given) {
    history.replaceState(null, '', location.pathname + location.search);
    keepToken(given);
  }
  return given || sessionStorage.getItem(KEY);
}

export const keepToken = token => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);
