/* Bully and Ring over the votes of a majority: three members, messages that are lost, late and doubled, members that
 * are started anew and have forgotten what they promised.
 *
 *   spin -a -DBULLY peers.pml && gcc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m100000
 *
 *   -DBULLY | -DRING      who claims; without either, anybody at any time, which is more than any strategy does
 *   -DCALM                nothing is lost, nobody dies, and patience is long enough: then only the highest claims
 *   -DRESTARTS=1          how often members are started anew
 *   -DTOKENS=3            how many claims there are, all in all
 *   -DREACHED             fails as soon as somebody leads: to see that the model gets there
 *   -DFORGETFUL, -DTWICE  planted bugs: no silence after a start; a promise gives way. Both must fail
 *   -DONCE                nobody renews: whose promise has run out does not vouch for that claim again. Fewer states
 *
 * A message is a mark that stays until it is overwritten by a newer one: it may arrive late, more than once, or never,
 * which is how it is lost. What a member sends to itself is done at once.
 *
 * Time is left out but for one axiom, which is what tenure._lease.trusted_until computes: who leads has stopped
 * believing before the first promise that it counts on runs out. So a promise may run out at any moment at which the
 * leader does not need it any more. The wall clock is an axiom, too: it is ahead of all tokens given before a start.
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

byte promised[N];             /* whom voter v vouches for; NOBODY */
byte under[N];                /* the token of that */
bool bound[N];                /* that it has not run out */
byte newest[N];               /* the highest token that v knows of */
byte term[N], before[N];      /* the highest that it vouched for and may have been won; the same before the last vote */
byte closed[N];               /* the highest that was won and handed back */
byte ghost[N], ghost_under[N];/* what v had promised before it was started anew, until it runs out */
bool silent[N];
Row told[N];                  /* told[v].by[j]: j has told v that it leads and claims nothing */
byte token[N];                /* the token that i claims or leads under, 0 for none */
bool leads[N];
Row asked[N];                 /* asked[i].by[v]: the newest claim of i to v that may still arrive */
Row vote[N];                  /* vote[i].by[v]: the token of v's vote for i, which may have arrived */
Row freed[N];                 /* freed[i].by[v]: the newest claim that i has taken back, and v may still hear of */
bool won[N];                  /* whether that had been won */
byte claims = 0, given = 0, restarts = 0;

/* --- the strategies: who claims. Stages: 0 idle, 1 asking (Ring: takes part), 2 yielding, 3 claims */
byte stage[N];
bool wants[N];
Row election[N], okay[N];     /* Bully: messages under way */
Row elect[N];                 /* Ring: elect[v].by[j]: candidate j is on its way to v */

inline count_votes(i, n) {
  n = (vote[i].by[0] == token[i]) + (vote[i].by[1] == token[i]) + (vote[i].by[2] == token[i])
}

/* May v's promise to h end without h, which leads, having too few? The axiom of time. */
#define NEEDS(h, v, t) (leads[h] && token[h] == t && vote[h].by[v] == t && \
  ((vote[h].by[0] == t) + (vote[h].by[1] == t) + (vote[h].by[2] == t)) <= 2)

inline let_go(v, c, t, w) {   /* v hears that c claims no more under t, and whether that was won */
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

inline promise(v, c, t) {     /* v vouches for c */
  promised[v] = c; under[v] = t; bound[v] = true;
#ifndef ONCE
  before[v] = term[v];
  if :: term[v] < t -> term[v] = t :: else fi;
#endif
  if :: newest[v] < t -> newest[v] = t :: else fi
}

/* Has v vouched for c under t, and for nobody else since? */
#define OF(v, c, t) (promised[v] == c && under[v] == t)

/* May v vouch for c, that leads and says so, though the token is not new? */
#ifdef ONCE
#define RENEWS(c, v) false
#else
#define RENEWS(c, v) (leads[c] && asked[c].by[v] == token[c] && OF(c, c, token[c]) && bound[c] && \
  asked[c].by[v] > term[v] && asked[c].by[v] > closed[v])
#endif

inline take_back(i, j) {      /* i claims or leads no more */
  for (j : 0 .. N - 1) { vote[i].by[j] = 0; asked[i].by[j] = 0; freed[i].by[j] = token[i] }
#ifndef ONCE
  won[i] = leads[i];
#endif
  leads[i] = false;
  let_go(i, i, token[i], won[i]);
  token[i] = 0;
  stage[i] = 0
}

inline hear_claim(v, c) {     /* v hears the claim of c, which may have been made long ago, and comes again */
  if
  :: OF(v, c, asked[c].by[v]) && (bound[v] || asked[c].by[v] > closed[v]) ->   /* again; nobody else since */
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
  :: else ->                  /* Deny tells the newest token */
     if :: newest[c] < newest[v] -> newest[c] = newest[v] :: else fi
  fi
}

inline hear_free(v, c) {
  let_go(v, c, freed[c].by[v], won[c]);
  freed[c].by[v] = 0
}

inline hear_election(v, c, to) {
  election[c].by[v] = 0;
  if
  :: wants[v] ->
     okay[c].by[v] = 1;
     if
     :: stage[v] == 0 && token[v] == 0 && v == N - 1 -> stage[v] = 3
     :: stage[v] == 0 && token[v] == 0 && v < N - 1 ->
        stage[v] = 1; for (to : v + 1 .. N - 1) { election[v].by[to] = 1 }; to = 0
     :: else
     fi
  :: else
  fi
}

inline hear_elect(v, c) {
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
  :: d_step { token[i] > 0 -> take_back(i, j); j = 0 }            /* gives up, resigns, or its time is over */
#endif

  /* --- votes: any claim that may arrive, as often as it likes --- */
  :: d_step { !silent[i] && asked[0].by[i] > 0 -> hear_claim(i, 0) }
  :: d_step { !silent[i] && asked[1].by[i] > 0 -> hear_claim(i, 1) }
  :: d_step { !silent[i] && asked[2].by[i] > 0 -> hear_claim(i, 2) }
  :: d_step { freed[(i + 1) % N].by[i] > 0 -> hear_free(i, (i + 1) % N) }
  :: d_step { freed[(i + 2) % N].by[i] > 0 -> hear_free(i, (i + 2) % N) }

  /* --- time --- */
#ifndef CALM
  :: d_step { bound[i] && !NEEDS(promised[i], i, under[i]) ->
       j = promised[i];
       /* a claimant that would count this vote now would find its trust over */
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

  /* --- started anew --- */
  :: d_step { restarts < RESTARTS ->
       restarts++;
       if :: token[i] > 0 -> take_back(i, j) :: else fi;
       for (j : 0 .. N - 1) { freed[i].by[j] = 0; told[i].by[j] = 0; okay[i].by[j] = 0; election[i].by[j] = 0 }
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
  :: d_step { silent[i] && ghost[i] == NOBODY -> silent[i] = false }          /* a whole lease was waited out */
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
  :: d_step { election[0].by[i] -> hear_election(i, 0, j) }
  :: d_step { election[1].by[i] -> hear_election(i, 1, j) }
  :: d_step { okay[i].by[1] -> okay[i].by[1] = 0; if :: stage[i] == 1 -> stage[i] = 2 :: else fi }
  :: d_step { okay[i].by[2] -> okay[i].by[2] = 0; if :: stage[i] == 1 -> stage[i] = 2 :: else fi }
#ifdef CALM
  :: d_step { stage[i] == 1 && !election[i].by[1] && !election[i].by[2] && !okay[i].by[1] && !okay[i].by[2] ->
       stage[i] = 3 }
#else
  :: d_step { stage[i] == 1 -> stage[i] = 3 }                                  /* nobody okayed in time */
  :: d_step { stage[i] == 2 -> stage[i] = 0 }                                  /* nobody leads in time */
#endif
#endif

#if !defined(BULLY) && !defined(RING)
  :: d_step { stage[i] == 0 && token[i] == 0 -> stage[i] = 3 }
#endif

#ifdef RING
  :: d_step { wants[i] && stage[i] == 0 && token[i] == 0 && !bound[i] ->
       stage[i] = 1; elect[(i + 1) % N].by[i] = 1 }
  :: d_step { elect[i].by[0] -> hear_elect(i, 0) }
  :: d_step { elect[i].by[1] -> hear_elect(i, 1) }
  :: d_step { elect[i].by[2] -> hear_elect(i, 2) }
#ifndef CALM
  :: d_step { stage[i] == 1 -> stage[i] = 0 }                                  /* it takes too long: begins anew */
  :: d_step { stage[i] == 1 && elect[(i + 1) % N].by[i] ->                     /* passes over a dead neighbour */
       elect[(i + 1) % N].by[i] = 0; elect[(i + 2) % N].by[i] = 1 }
#endif
#endif
  od
}

#ifdef CALM
/* Whoever claims is the highest that wants it. */
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
  wants[0] = true; wants[1] = true; wants[2] = true;  /* who does not begin does not want it */
#endif
  atomic { run member(0); run member(1); run member(2) }
}
