"""What one client may ask of the gateway, and the reason for each number."""

from __future__ import annotations

MAX_BODY_BYTES = 16 * 1024 * 1024
"""One body: what the JSON of the largest request the queue takes (12 MiB encoded) needs in almost every case."""

MAX_BODIES_BYTES = 256 * 1024 * 1024
"""All bodies that are being read, or wait for their submit, at once: what slow or many senders of large bodies can make
the gateway hold, also while the queue is away. Tenants have shares of them (`services/gateway/shares.py`). What is
parsed of them takes more, of a list of token ids six times."""

MAX_FILLING = 128
"""Uploads that have more in memory than 64 KiB. Of each a part that fills, and one on its way to the queue, may be: 256
MiB of them all. Of others nothing is held but that, and what their connections hold."""

PART_TIMEOUT_S = 30.0
"""In which a part of an upload (1 MiB) is to come while others wait: 35 kB/s. While nobody does it may take longer."""

PART_SLACK_S = 3.0
"""Of an upload that others wait for: the longest pause, as TCP makes when it repeats what was lost."""

MAX_PAGES_BYTES = 256 * 1024 * 1024
"""Of files, lists and large answers that are being sent, in memory at once, as whole MiB for each. Of results it is
what telling them takes."""

TELLING = 4
"""What results take in memory for each byte they have encoded: as they are read, and one of them as a line. Of text it
is half of that, and of log probabilities, which are written with many digits and names, more."""

MAX_READING = 4
"""Pages that are read at once: only then is it known what they take, of a result up to 12 MiB."""

MAX_LOOKING = 4
"""Requests that are looked up at once by who asks for their state, beside those: most are small, and told at once."""

MAX_COUNTING = 4
"""Batches that have ended of which it is looked up at once what has ended anew: each takes a watch, of which the
gateway has 600 (`MAX_WATCHES`), and counts as many lines as were requeued."""

LOOK_WAIT_S = 30.0
"""For the turn of such a look or count: there are a thousand looks in a second where answers are small and the queue is
there."""

PAGE_SLACK_S = 1.0
"""In which a client is to take 64 KiB of a page that others wait for; else it is let go, and read again."""

MAX_TOGETHER_BYTES = 64 * 1024 * 1024
"""The requests of one body with several prompts, each of which has all the other fields again: four times the largest
body. A thousand prompts that fill a body may still share a schema of 48 KiB; without a bound half a MiB that all of
them share would be half a GiB in the queue's store, and a body of 11 MiB as many GiB."""

SUBMIT_WINDOW_BYTES = 2 * 1024 * 1024
"""Of the requests of one body that are on their way to the queue at once: two frames, of which one is stored while the
next is written. Each of a hundred bodies may be on its way (`MAX_SUBMITS` of a client)."""

MAX_ANSWERS_BYTES = 32 * 1024 * 1024
"""The results of one body with several prompts that are told as one answer: writing it takes ten times as much. 128
prompts of 4,096 tokens, each token scored beside the likeliest, take 26 MiB; a stream is told result by result."""

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers: what other servers take at most (nginx 32 KiB, Apache 64 KiB)."""

MAX_AHEAD_BYTES = 64 * 1024
"""What a connection holds of requests that were sent before the one before them was answered: hundreds of small ones.
Reading pauses beyond it: with one read more this is all the memory it takes."""

AHEAD_S = 10.0
"""In which the answer is to end while reading pauses for who sent that much ahead: that it goes away is not seen."""

LINGER_S = 10.0
"""A client that was answered before it had sent all of its body gets this long to read the answer; what it sends
meanwhile is dropped. Closing at once would reset the connection under the answer."""

WRITE_TIMEOUT_S = 60.0
"""A client that takes next to nothing for this long has gone, whatever TCP says."""

LEAST_TAKEN_BYTES = 64 * 1024
"""Of an answer, in that time, by who is behind with it: 1.1 kB/s, below which the largest answers take hours."""

MAX_CLOSING_S = 24 * 3600.0
"""For what is unsent when a connection over TLS is closed, and its client takes that least all the time: as good as no
bound, which TLS transports do not know."""

MAX_ABANDONED = 4096
"""Requests that are to be cancelled, as their clients have gone, once the queue answers: of more the oldest go on, of
the key that has the most. And as many that had no answer to their submit, of which the newest go on. It takes some
hundred bytes for each; one call cancels up to 10,000."""

KEEP_ALIVE_S = 15.0
"""A stream that has nothing to say for this long sends a comment: below the idle limits of common proxies (60 s), and
early enough that a client learns of its request's id while the request waits."""

SETTLE_S = 1.0
"""After the grace period, for cancelling at the queue what nobody waits for any more: half of the two seconds after it
in which a service is gone, so that as long is left for closing connections and for the process's own end."""

IDLE_CONNECTION_S = 75.0
"""A connection between two requests is kept this long: longer than the pools of common clients keep theirs, so that
it is they who close it."""

RETRY_AFTER_S = 2
"""Told to a client that finds the queue away: a supervised queue is back within seconds."""

CLIENT_CLOSED = 499
"""Status of a request whose client did not wait for its answer: counted, and told to nobody."""
