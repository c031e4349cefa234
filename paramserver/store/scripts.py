"""Operations that the server does in one step: fixed Lua scripts, which take everything from KEYS and ARGV.

Keys of a job: an entry is a hash (value, revision, and the requests of its last revisions); the leader is a hash
(token, holder) that expires with the lease; the term is a number that stays.

A full server refuses commands that need memory but not PEXPIRE, so extending a lease uses no other write.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

# Requests are recognized when they come again up to so many revisions later.
KEPT_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name under which a server remembers it."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        # SHA-1 is the server's way to name scripts.
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


# Compare and set.
#   KEYS  the entry, the term
#   ARGV  expected revision (0: no entry), the next revision, value, a name for this request, the writer's term (0:
#         none), the revision whose request is forgotten
#   returns  {1, new revision} if this request has written, {0, present revision}, or {2, known term} if fenced
SAVE = Script("""
if redis.call('HGET', KEYS[1], 'request:' .. ARGV[2]) == ARGV[4] then
  return {1, ARGV[2]}
end
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
local term = tonumber(ARGV[5])
if term > 0 and known > term then
  return {2, known}
end
local revision = redis.call('HGET', KEYS[1], 'revision') or '0'
if revision ~= ARGV[1] then
  return {0, revision}
end
redis.call('HSET', KEYS[1], 'value', ARGV[3], 'revision', ARGV[2], 'request:' .. ARGV[2], ARGV[4])
redis.call('HDEL', KEYS[1], 'request:' .. ARGV[6])
return {1, ARGV[2]}
""")

# Remove an entry.
#   KEYS  the entry, the term
#   ARGV  the writer's term (0: none)
#   returns  0, or the known term if fenced
DELETE = Script("""
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
local term = tonumber(ARGV[1])
if term > 0 and known > term then
  return known
end
redis.call('DEL', KEYS[1])
return 0
""")

# Take or extend the leadership.
#   KEYS  the leader, the term
#   ARGV  token, holder, lease in ms, term (0: a new one), highest term known elsewhere
#   returns  {1 or 0: leads, term, holder, the rest of the lease in ms}
LEAD = Script("""
local leader = redis.call('HMGET', KEYS[1], 'token', 'holder')
local left = redis.call('PTTL', KEYS[1])
local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
local held = leader[1] and left > 0
local term = tonumber(ARGV[4])
if held and leader[1] ~= ARGV[1] then
  if term <= stored then
    return {0, stored, leader[2], left}
  end
  held = false -- a leader of a later term: this lease is of a state before
end
local known = math.max(stored, tonumber(ARGV[5]))
if term == 0 then
  if held and stored > 0 and stored == known then
    term = stored
  else
    term = known + 1
  end
elseif held then
  term = math.max(term, stored)
end
if known > term then
  return {0, known, '', 0}
end
if term ~= stored then
  redis.call('SET', KEYS[2], term)
end
if not held or leader[2] ~= ARGV[2] then
  redis.call('HSET', KEYS[1], 'token', ARGV[1], 'holder', ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {1, term, ARGV[2], ARGV[3]}
""")

# Give the leadership back.
#   KEYS  the leader
#   ARGV  token
RESIGN = Script("""
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 0
""")

# The present leader.
#   KEYS  the leader, the term
#   returns  {term, holder, the rest of the lease in ms}, or {} if there is no leader
LEADER = Script("""
local holder = redis.call('HGET', KEYS[1], 'holder')
local left = redis.call('PTTL', KEYS[1])
if not holder or left <= 0 then
  return {}
end
return {tonumber(redis.call('GET', KEYS[2]) or '0'), holder, left}
""")
