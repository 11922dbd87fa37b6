"""How much of each request's posts nobody has read yet, and which request has too much."""

from __future__ import annotations

import threading
import weakref
from typing import Final

from nnsight_async.errors import MailboxFullError

#: Bytes of unread posts that a model's requests may have together, unless ``mailbox_bytes`` says otherwise.
DEFAULT_LIMIT: Final = 1 << 30


class Account:
    """One request's unread bytes; from any thread."""

    def __init__(self, ledger: Ledger) -> None:
        self.unread = 0
        self._ledger = ledger
        self._finished = False

    def arrive(self, nbytes: int) -> None:
        """A post of so many bytes has come, which counts as unread.

        Raises:
            MailboxFullError: the posts before it fill the request's share. A post that finds nothing unread is always
                taken in, whatever its size.
        """
        if self.unread:
            self._ledger.check(self, nbytes)
        with self._ledger.lock:
            self.unread += nbytes

    def read(self, nbytes: int) -> None:
        """So many bytes have been read."""
        with self._ledger.lock:
            self.unread -= nbytes
        self._close_if_read()

    def finish(self) -> None:
        """No more posts will come; what is unread goes on to count until it is read, or until nobody can."""
        self._finished = True
        self._close_if_read()

    def _close_if_read(self) -> None:
        if self._finished and self.unread <= 0:
            self._ledger.accounts.discard(self)


class Ledger:
    """The accounts of a model's requests.

    A request's share is the limit divided by the number of requests that run or have something unread. As long as all
    of them together keep to the limit, one may have more than its share.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self.accounts: weakref.WeakSet[Account] = weakref.WeakSet()
        self.lock = threading.Lock()

    @property
    def unread(self) -> int:
        """Bytes that nobody has read yet."""
        return sum(account.unread for account in list(self.accounts))

    def open(self) -> Account:
        """The account of one more request. It is closed when the request is finished and read, or forgotten."""
        account = Account(self)
        self.accounts.add(account)
        return account

    def check(self, account: Account, nbytes: int) -> None:
        """Raise MailboxFullError if the account has its share and there is no room for so many bytes more."""
        count = len(self.accounts)
        if account.unread >= self.limit // max(count, 1) and self.unread + nbytes > self.limit:
            raise MailboxFullError(
                f"{account.unread:,} bytes of saved values wait to be read, which is this request's share of the "
                f"model's mailbox_bytes={self.limit:,} ({count} requests share it): take the outputs out of the "
                "stream faster, save less in the block, or give the model a larger mailbox_bytes"
            )
