/* Bully and Ring with the votes of a majority: three members; messages that are lost, late and doubled; members that
 * restart and have lost their promises.
 *
 *   spin -a -DBULLY peers.pml && gcc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m100000
 *
 *   -DBULLY | -DRING      the strategy; without either, any member claims at any time, which is more than any strategy
 *   -DCALM                no faults: no loss, no deaths, long enough patience. Only the highest member claims
 *   -DRESTARTS=1          the number of restarts of members
 *   -DTOKENS=3            the number of claims
 *   -DREACHED             fails as soon as somebody leads: shows that the model gets there
 *   -DFORGETFUL, -DTWICE  planted bugs: no silence after a start; a promise that gives way. Both must fail
 *   -DONCE                no renewals: after a promise has run out, no vote for that claim again. Fewer states
 *
 * A message is a mark that stays until a newer one overwrites it: it may arrive late, more than once, or never (so it
 * is lost). A message from a member to itself is handled at once.
 *
 * Time is left out but for one axiom, which is what tenure._lease.trusted_until computes: a leader ends its
 * term before the first promise that it counts on runs out. So a promise may run out at any moment at which the leader
 * does not need it any more. The wall clock is an axiom, too: it is ahead of all tokens given before a start.
 */
#ifndef TOKENS
#define TOKENS 3
#endif
#ifndef RESTARTS
#define RESTARTS 1
#endif
#define N 3
#define NOBODY 3

typedef Row { byte by[N] };

byte promised[N];             /* the claimant that has the vote of v; NOBODY */
byte under[N];                /* the token of that claim */
bool bound[N];                /* the promise has not run out */
byte newest[N];               /* the highest token that v knows */
byte term[N], before[N];      /* the highest that v voted for and may have been won; the same before the last vote */
byte closed[N];               /* the highest that was won and released */
byte ghost[N], ghost_under[N];/* the promise of v before its restart, until it runs out */
bool silent[N];
Row told[N];                  /* told[v].by[j]: j has replied to v that it leads and claims nothing */
byte token[N];                /* the token that i claims or leads under, 0 for none */
bool leads[N];
Row asked[N];                 /* asked[i].by[v]: the newest claim of i to v that may still arrive */
Row vote[N];                  /* vote[i].by[v]: the token of v's vote for i, which may have arrived */
Row freed[N];                 /* freed[i].by[v]: the newest claim that i has released, which v may still receive */
bool won[N];                  /* whether that had been won */
byte claims = 0, given = 0, restarts = 0;

/* --- the strategies: which member claims. Stages: 0 idle, 1 asking (Ring: participant), 2 yielding, 3 claims */
byte stage[N];
bool wants[N];
Row election[N], ok[N];     /* Bully: ELECTION and OK under way */
Row elect[N];                 /* Ring: elect[v].by[j]: candidate j is on its way to v */

inline count_votes(i, n) {
  n = (vote[i].by[0] == token[i]) + (vote[i].by[1] == token[i]) + (vote[i].by[2] == token[i])
}

/* Does h, which leads, need v's promise for its majority? Then it has not run out: the axiom of time. */
#define NEEDS(h, v, t) (leads[h] && token[h] == t && vote[h].by[v] == t && \
  ((vote[h].by[0] == t) + (vote[h].by[1] == t) + (vote[h].by[2] == t)) <= 2)

inline free_vote(v, c, t, w) {   /* v receives that c has released its claim under t, and whether that was won */
#ifndef ONCE
  if :: w && closed[v] < t -> closed[v] = t :: else fi;
  if :: !w && promised[v] == c && under[v] == t -> term[v] = before[v] :: else fi;
#endif
  if
  :: promised[v] == c && under[v] == t -> promised[v] = NOBODY; under[v] = 0; bound[v] = false
  :: else
  fi;
  if :: newest[v] < t -> newest[v] = t :: else fi
}

inline promise(v, c, t) {     /* v votes for c */
  promised[v] = c; under[v] = t; bound[v] = true;
#ifndef ONCE
  before[v] = term[v];
  if :: term[v] < t -> term[v] = t :: else fi;
#endif
  if :: newest[v] < t -> newest[v] = t :: else fi
}

/* Has v voted for c under t, and for no other since? */
#define OF(v, c, t) (promised[v] == c && under[v] == t)

/* May v vote for c, which leads and renews, though the token is not new? */
#ifdef ONCE
#define RENEWS(c, v) false
#else
#define RENEWS(c, v) (leads[c] && asked[c].by[v] == token[c] && OF(c, c, token[c]) && bound[c] && \
  asked[c].by[v] > term[v] && asked[c].by[v] > closed[v])
#endif

inline end_claim(i, j) {      /* i ends its claim or its term */
  for (j : 0 .. N - 1) { vote[i].by[j] = 0; asked[i].by[j] = 0; freed[i].by[j] = token[i] }
#ifndef ONCE
  won[i] = leads[i];
#endif
  leads[i] = false;
  free_vote(i, i, token[i], won[i]);
  token[i] = 0;
  stage[i] = 0
}

inline receive_claim(v, c) {     /* v receives the claim of c, which may be old, or a repetition */
  if
  :: OF(v, c, asked[c].by[v]) && (bound[v] || asked[c].by[v] > closed[v]) ->   /* again; no other since */
     if :: !bound[v] -> promise(v, c, asked[c].by[v]) :: else fi;
     if :: under[v] == token[c] -> vote[c].by[v] = under[v] :: else fi
#ifdef TWICE
  :: !OF(v, c, asked[c].by[v]) && asked[c].by[v] > newest[v] ->
#else
  :: !OF(v, c, asked[c].by[v]) && !bound[v] && asked[c].by[v] > newest[v] ->
#endif
     promise(v, c, asked[c].by[v]);
     if :: under[v] == token[c] -> vote[c].by[v] = under[v] :: else fi
  :: !OF(v, c, asked[c].by[v]) && !bound[v] && asked[c].by[v] <= newest[v] && RENEWS(c, v) ->
     promise(v, c, asked[c].by[v]);
     vote[c].by[v] = under[v]
  :: else ->                  /* a Refusal carries the newest token */
     if :: newest[c] < newest[v] -> newest[c] = newest[v] :: else fi
  fi
}

inline receive_release(v, c) {
  free_vote(v, c, freed[c].by[v], won[c]);
  freed[c].by[v] = 0
}

inline receive_election(v, c, to) {
  election[c].by[v] = 0;
  if
  :: wants[v] ->
     ok[c].by[v] = 1;
     if
     :: stage[v] == 0 && token[v] == 0 && v == N - 1 -> stage[v] = 3
     :: stage[v] == 0 && token[v] == 0 && v < N - 1 ->
        stage[v] = 1; for (to : v + 1 .. N - 1) { election[v].by[to] = 1 }; to = 0
     :: else
     fi
  :: else
  fi
}

inline receive_ring(v, c) {
  elect[v].by[c] = 0;
  if
  :: c == v && wants[v] && stage[v] == 1 -> stage[v] = 3
  :: c == v && !(wants[v] && stage[v] == 1) -> skip
  :: c != v && !wants[v] -> elect[(v + 1) % N].by[c] = 1
  :: c > v && wants[v] -> elect[(v + 1) % N].by[c] = 1; if :: stage[v] == 0 -> stage[v] = 1 :: else fi
  :: c < v && wants[v] && stage[v] == 0 && token[v] == 0 -> stage[v] = 1; elect[(v + 1) % N].by[v] = 1
  :: c < v && wants[v] && !(stage[v] == 0 && token[v] == 0) -> skip
  fi
}

proctype member(byte i) {
  byte v, n, j;
  do
  /* --- claims --- */
  :: d_step { stage[i] == 3 && token[i] == 0 && claims < TOKENS && !silent[i] && !bound[i] ->
       claims++;
       newest[i]++;
       token[i] = newest[i];
       promise(i, i, token[i]);
       for (v : 0 .. N - 1) { asked[i].by[v] = token[i]; vote[i].by[v] = 0; freed[i].by[v] = 0 }
       asked[i].by[i] = 0;
       vote[i].by[i] = token[i];
       v = 0; n = 0 }
  :: d_step { stage[i] == 3 && (silent[i] || bound[i]) && token[i] == 0 -> stage[i] = 0 }
  :: d_step { token[i] > 0 && !leads[i] ->
       count_votes(i, n);
       if
       :: n >= 2 ->
          leads[i] = true;
          for (j : 0 .. N - 1) { assert(j == i || !leads[j]) }
          assert(token[i] > given);
          given = token[i]
#ifdef REACHED
          ; assert(false)
#endif
       :: else
       fi;
       n = 0; j = 0 }
#ifndef CALM
  :: d_step { token[i] > 0 -> end_claim(i, j); j = 0 }            /* gives up, resigns, or its time is over */
#endif

  /* --- votes: any claim that may arrive, any number of times --- */
  :: d_step { !silent[i] && asked[0].by[i] > 0 -> receive_claim(i, 0) }
  :: d_step { !silent[i] && asked[1].by[i] > 0 -> receive_claim(i, 1) }
  :: d_step { !silent[i] && asked[2].by[i] > 0 -> receive_claim(i, 2) }
  :: d_step { freed[(i + 1) % N].by[i] > 0 -> receive_release(i, (i + 1) % N) }
  :: d_step { freed[(i + 2) % N].by[i] > 0 -> receive_release(i, (i + 2) % N) }

  /* --- time --- */
#ifndef CALM
  :: d_step { bound[i] && !NEEDS(promised[i], i, under[i]) ->
       j = promised[i];
       /* a claimant that counted this vote now would find its term over */
       if :: vote[j].by[i] == under[i] -> vote[j].by[i] = 0 :: else fi;
       bound[i] = false; j = 0
#ifdef ONCE
       ; promised[i] = NOBODY; under[i] = 0
#endif
     }
  :: d_step { ghost[i] != NOBODY && !NEEDS(ghost[i], i, ghost_under[i]) ->
       j = ghost[i];
       if :: vote[j].by[i] == ghost_under[i] -> vote[j].by[i] = 0 :: else fi;
       ghost[i] = NOBODY; j = 0 }

  /* --- restarts --- */
  :: d_step { restarts < RESTARTS ->
       restarts++;
       if :: token[i] > 0 -> end_claim(i, j) :: else fi;
       for (j : 0 .. N - 1) { freed[i].by[j] = 0; told[i].by[j] = 0; ok[i].by[j] = 0; election[i].by[j] = 0 }
       if :: bound[i] -> ghost[i] = promised[i]; ghost_under[i] = under[i] :: else fi;
       promised[i] = NOBODY; under[i] = 0; bound[i] = false;
       term[i] = 0; before[i] = 0; closed[i] = 0;
       stage[i] = 0;
#ifndef FORGETFUL
       silent[i] = true;
#endif
       newest[i] = 0;
       for (j : 0 .. N - 1) { if :: newest[i] < newest[j] -> newest[i] = newest[j] :: else fi };  /* the wall clock */
       if :: newest[i] < given -> newest[i] = given :: else fi;
       j = 0 }
  :: d_step { silent[i] && ghost[i] == NOBODY -> silent[i] = false }          /* a whole lease is over */
  :: d_step { silent[i] && told[i].by[(i + 1) % N] && told[i].by[(i + 2) % N] -> silent[i] = false }
  :: d_step { silent[(i + 1) % N] && token[i] == 0 -> told[(i + 1) % N].by[i] = true; vote[i].by[(i + 1) % N] = 0 }
  :: d_step { silent[(i + 2) % N] && token[i] == 0 -> told[(i + 2) % N].by[i] = true; vote[i].by[(i + 2) % N] = 0 }
#endif

#ifdef BULLY
  :: d_step { wants[i] && stage[i] == 0 && token[i] == 0 && !bound[i] ->
       if
       :: i == N - 1 -> stage[i] = 3
       :: else -> stage[i] = 1; for (j : i + 1 .. N - 1) { election[i].by[j] = 1 }
       fi;
       j = 0 }
  :: d_step { election[0].by[i] -> receive_election(i, 0, j) }
  :: d_step { election[1].by[i] -> receive_election(i, 1, j) }
  :: d_step { ok[i].by[1] -> ok[i].by[1] = 0; if :: stage[i] == 1 -> stage[i] = 2 :: else fi }
  :: d_step { ok[i].by[2] -> ok[i].by[2] = 0; if :: stage[i] == 1 -> stage[i] = 2 :: else fi }
#ifdef CALM
  :: d_step { stage[i] == 1 && !election[i].by[1] && !election[i].by[2] && !ok[i].by[1] && !ok[i].by[2] ->
       stage[i] = 3 }
#else
  :: d_step { stage[i] == 1 -> stage[i] = 3 }                                  /* no OK in time */
  :: d_step { stage[i] == 2 -> stage[i] = 0 }                                  /* nobody leads in time */
#endif
#endif

#if !defined(BULLY) && !defined(RING)
  :: d_step { stage[i] == 0 && token[i] == 0 -> stage[i] = 3 }
#endif

#ifdef RING
  :: d_step { wants[i] && stage[i] == 0 && token[i] == 0 && !bound[i] ->
       stage[i] = 1; elect[(i + 1) % N].by[i] = 1 }
  :: d_step { elect[i].by[0] -> receive_ring(i, 0) }
  :: d_step { elect[i].by[1] -> receive_ring(i, 1) }
  :: d_step { elect[i].by[2] -> receive_ring(i, 2) }
#ifndef CALM
  :: d_step { stage[i] == 1 -> stage[i] = 0 }                                  /* it takes too long: begins again */
  :: d_step { stage[i] == 1 && elect[(i + 1) % N].by[i] ->                     /* passes over a dead neighbour */
       elect[(i + 1) % N].by[i] = 0; elect[(i + 2) % N].by[i] = 1 }
#endif
#endif
  od
}

#ifdef CALM
/* A claimant is the highest member that wants the name. */
active proctype calm() {
  byte i;
  do
  :: d_step { claims > 0 ->
       for (i : 0 .. N - 1) { assert(token[i] == 0 || (wants[i] && (i == 2 || !wants[2]) && (i > 0 || !wants[1]))) };
       i = 0 } -> break
  od
}
#endif

init {
  byte i;
  d_step {
    for (i : 0 .. N - 1) { promised[i] = NOBODY; ghost[i] = NOBODY }
    i = 0
  };
#ifdef CALM
  if :: wants[0] = true :: skip fi;
  if :: wants[1] = true :: skip fi;
  if :: wants[2] = true :: skip fi;
#else
  wants[0] = true; wants[1] = true; wants[2] = true;  /* a member that does not begin does not want it */
#endif
  atomic { run member(0); run member(1); run member(2) }
}
