/* A strict NCCL: it moves nothing, and sees to it that ranks ask for what fits together, where the real one hangs or adds up the wrong
 * things. Ranks are processes that share a file (FAKE_NCCL_WORLD), or one process alone.
 *
 * - A communicator comes about when all of its ranks have asked for it; one that never comes is named (FAKE_NCCL_LIMIT, seconds).
 * - Collectives of a communicator are the same on all ranks, in one order, of one size and type. The first use connects ranks: the host
 *   waits for the others there, as with the real one.
 * - Messages between two ranks are received in the order in which they are sent, with their sizes. A stream waits in a group until all whom
 *   it needs have come to theirs, so what waits in a circle waits here too.
 * - Everything is asked for in groups, of one communicator and stream each, and only when what was asked for before has settled.
 * - At the end all ranks have asked for the same number of collectives, and every message was received.
 * - A communicator that is aborted ends when the graphs that it was captured in are gone.
 *
 * What does not fit is an error of the communicator on all ranks, and a line of FAKE_NCCL_WORLD.errors.
 *
 * FAKE_NCCL_WRONG=RANK:absent|size|skip|turn has a rank do the wrong thing: it never comes to a communicator, asks for one element too many,
 * leaves the fifth collective or message out, or turns the fifth and the sixth round. */

#include "fake.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { COMMS = 512, MEMBERS = 16, CALLS = 8192, MESSAGES = 8192, IN_PROGRESS = 7 };

struct id {
    char text[128];
};

/* What a rank asks for: `peer` of messages alone, `count` in elements or bytes. */
struct ask {
    const char *function;
    int type, peer;
    uint64_t count;
};

/* A collective, as the first rank that came to it asked for it. */
struct call {
    char function[24];
    int type, rank;
    uint64_t count;
};

/* Messages from one rank to another: how many were sent and received, by hosts and by streams. */
struct pair {
    uint64_t sent, received, sends, receives;
    uint64_t bytes[MESSAGES];
};

/* A communicator, as all processes see it. */
struct shared {
    struct id id;
    int ranks, joined, left;
    int member[MEMBERS];
    uint64_t posted[MEMBERS], arrived[MEMBERS];
    uint64_t known;
    int failed;
    char error[512];
    struct call calls[CALLS];
    struct pair pairs[MEMBERS][MEMBERS];
};

struct world {
    int owner;
    struct shared comms[COMMS];
};

/* A communicator of this process. */
struct comm {
    struct id id;
    struct shared *shared;
    int rank, ranks, settled, finalizing, aborted, connects;
    int sends_to[MEMBERS], receives_from[MEMBERS];
    /* Groups of it in graphs. */
    int captured;
    size_t queued;
    uint64_t asks;
    double since;
};

/* What is asked for at once. */
struct group {
    struct comm *comm;
    struct stream *stream;
    size_t count;
    struct ask *asks;
    /* The index of every ask among those of its kind, once it is posted. */
    uint64_t *at;
    int arrived;
};

struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

static __thread struct group asked;
static __thread int groups;

struct world *fake_world;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct world *world(void) {
    if (fake_world)
        return fake_world;
    const char *path = getenv("FAKE_NCCL_WORLD");
    int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    int flags = (file < 0 ? MAP_ANONYMOUS | MAP_PRIVATE : MAP_SHARED) | MAP_NORESERVE;
    if (file >= 0 && ftruncate(file, sizeof(struct world)))
        abort();
    void *at = mmap(NULL, sizeof(struct world), PROT_READ | PROT_WRITE, flags, file, 0);
    if (at == MAP_FAILED)
        abort();
    /* A few pages of a file that is mostly holes: what is read ahead would be nothing but zeros, and most of the time. */
    madvise(at, sizeof(struct world), MADV_RANDOM);
    return fake_world = at;
}

/* One process at a time. One that was killed inside leaves it to the next. */
static void enter(void) {
    for (int looks = 1;; looks++) {
        int nobody = 0;
        if (__atomic_compare_exchange_n(&world()->owner, &nobody, getpid(), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return;
        if (looks % 4096 == 0 && nobody != getpid() && kill(nobody, 0) && errno == ESRCH)
            __atomic_compare_exchange_n(&world()->owner, &nobody, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        sched_yield();
    }
}
static void leave(void) { __atomic_store_n(&world()->owner, 0, __ATOMIC_SEQ_CST); }

static void fail(struct shared *shared, const char *format, ...) {
    if (shared->failed)
        return;
    char text[400];
    va_list more;
    va_start(more, format);
    vsnprintf(text, sizeof text, format, more);
    va_end(more);
    snprintf(shared->error, sizeof shared->error, "communicator %.80s: %s", shared->id.text, text);
    shared->failed = 3;
    const char *path = getenv("FAKE_NCCL_WORLD");
    char errors[4096];
    snprintf(errors, sizeof errors, "%s.errors", path ? path : "");
    FILE *file = path ? fopen(errors, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", shared->error);
        fclose(file);
    }
}

/* Whether this rank is to do this wrong. */
static int does_wrong(const char *what) {
    const char *wrong = getenv("FAKE_NCCL_WRONG"), *rank = getenv("RANK");
    return wrong && rank && atoi(wrong) == atoi(rank) && strchr(wrong, ':') && !strcmp(strchr(wrong, ':') + 1, what);
}

/* ---- what streams come to ---- */

static int is_send(const struct ask *ask) { return !strcmp(ask->function, "ncclSend"); }

/* Of the message that a rank asks for. */
static struct pair *pair_of(const struct comm *comm, const struct ask *ask) {
    int from = is_send(ask) ? comm->rank : ask->peer, to = is_send(ask) ? ask->peer : comm->rank;
    return &comm->shared->pairs[from][to];
}

static uint64_t post_collective(struct comm *comm, const struct ask *ask) {
    struct shared *s = comm->shared;
    uint64_t at = s->posted[comm->rank]++;
    struct call *call = &s->calls[at % CALLS];
    if (at >= s->known) {
        snprintf(call->function, sizeof call->function, "%s", ask->function);
        call->type = ask->type;
        call->count = ask->count;
        call->rank = comm->rank;
        s->known = at + 1;
    } else if (s->known - at > CALLS) {
        fail(s, "rank %d lags by more than %d collectives", comm->rank, CALLS);
    } else if (strcmp(call->function, ask->function) || call->type != ask->type || call->count != ask->count) {
        fail(s, "collective %llu is %s of %llu of type %d on rank %d and %s of %llu of type %d on rank %d", (unsigned long long)at,
             call->function, (unsigned long long)call->count, call->type, call->rank, ask->function, (unsigned long long)ask->count,
             ask->type, comm->rank);
    }
    return at;
}

static uint64_t post_message(struct comm *comm, const struct ask *ask) {
    struct pair *pair = pair_of(comm, ask);
    uint64_t *mine = is_send(ask) ? &pair->sent : &pair->received, theirs = is_send(ask) ? pair->received : pair->sent;
    uint64_t at = (*mine)++, bytes = pair->bytes[at % MESSAGES];
    int from = is_send(ask) ? comm->rank : ask->peer, to = is_send(ask) ? ask->peer : comm->rank;
    if (at >= theirs + MESSAGES || theirs > at + MESSAGES)
        fail(comm->shared, "messages from rank %d to rank %d: one side is more than %d ahead", from, to, MESSAGES);
    else if (at >= theirs)
        pair->bytes[at % MESSAGES] = ask->count;
    else if (bytes != ask->count)
        fail(comm->shared, "message %llu from rank %d to rank %d: rank %d has %llu bytes, the other %llu", (unsigned long long)at, from,
             to, comm->rank, (unsigned long long)ask->count, (unsigned long long)bytes);
    return at;
}

struct group *fake_post_group(struct group *asks) {
    struct group *group = malloc(sizeof *group);
    *group = *asks;
    group->arrived = 0;
    group->at = calloc(group->count, sizeof *group->at);
    enter();
    for (size_t i = 0; i < group->count; i++) {
        struct ask *ask = &group->asks[i];
        group->at[i] = ask->peer < 0 ? post_collective(group->comm, ask) : post_message(group->comm, ask);
    }
    leave();
    group->comm->queued++;
    return group;
}

static int arrived(struct group *group) {
    struct comm *comm = group->comm;
    struct shared *s = comm->shared;
    for (size_t i = 0; i < group->count; i++) {
        struct ask *ask = &group->asks[i];
        if (ask->peer >= 0) {
            struct pair *pair = pair_of(comm, ask);
            if ((is_send(ask) ? pair->receives : pair->sends) <= group->at[i])
                return 0;
            continue;
        }
        for (int rank = 0; rank < s->ranks; rank++)
            if (s->arrived[rank] <= group->at[i])
                return 0;
    }
    return 1;
}

void fake_hold_group(struct group *group, int graphs) { __atomic_add_fetch(&group->comm->captured, graphs, __ATOMIC_SEQ_CST); }

int fake_group_done(struct group *group) {
    struct comm *comm = group->comm;
    enter();
    for (size_t i = 0; !group->arrived && i < group->count; i++) {
        struct ask *ask = &group->asks[i];
        if (ask->peer < 0)
            comm->shared->arrived[comm->rank]++;
        else if (is_send(ask))
            pair_of(comm, ask)->sends++;
        else
            pair_of(comm, ask)->receives++;
    }
    group->arrived = 1;
    int done = comm->aborted || arrived(group);
    leave();
    if (done) {
        comm->queued--;
        free(group->at);
        free(group);
    }
    return done;
}

/* ---- communicators ---- */

int ncclGetVersion(int *version) {
    TRY;
    *version = (int)fake_number("FAKE_NCCL_VERSION", 22809);
    return 0;
}
int ncclGetUniqueId(struct id *id) {
    static int count;
    TRY;
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "%s-%d-%d", getenv("RANK"), getpid(), count++);
    return 0;
}

/* The communicator of this name, or a free place for it. */
static struct shared *find(struct id id) {
    struct shared *none = NULL;
    for (size_t i = 0; i < COMMS; i++) {
        struct shared *s = &world()->comms[i];
        if (s->ranks && !strcmp(s->id.text, id.text))
            return s;
        if (!s->ranks && !none)
            none = s;
    }
    return none;
}

int ncclCommInitRankConfig(struct comm **out, int ranks, struct id id, int rank, struct config *config) {
    TRY;
    if (config->size != 48 || config->magic != 0xcafebeef || config->version != 21700 || config->blocking)
        return 4;
    if (rank < 0 || rank >= ranks || ranks > MEMBERS)
        return 4;
    struct comm *comm = *out = calloc(1, sizeof *comm);
    enter();
    struct shared *s = find(id);
    if (!s) {
        leave();
        return 3;
    }
    if (!s->ranks) {
        s->id = id;
        s->ranks = ranks;
        s->joined = s->left = s->failed = 0;
        s->known = 0;
        memset(s->member, 0, sizeof s->member);
        memset(s->posted, 0, sizeof s->posted);
        memset(s->arrived, 0, sizeof s->arrived);
        for (int a = 0; a < ranks; a++)
            for (int b = 0; b < ranks; b++)
                s->pairs[a][b].sent = s->pairs[a][b].received = s->pairs[a][b].sends = s->pairs[a][b].receives = 0;
    }
    if (does_wrong("absent"))
        ranks = s->ranks;
    else if (s->ranks != ranks)
        fail(s, "rank %d says that it has %d ranks, another %d", rank, ranks, s->ranks);
    else if (s->member[rank]++)
        fail(s, "two processes are rank %d", rank);
    s->joined++;
    leave();
    *comm = (struct comm){.id = id, .shared = s, .rank = rank, .ranks = ranks, .since = now()};
    fake_write_down("init", id.text, (unsigned long long)ranks);
    return IN_PROGRESS;
}

/* The first rank that this one waits for on the host; -1 if it waits for none. */
static int awaited(struct comm *comm) {
    struct shared *s = comm->shared;
    for (int rank = 0; rank < s->ranks; rank++) {
        if (!s->member[rank] || (comm->connects && !s->posted[rank]))
            return rank;
        if (comm->sends_to[rank] && !s->pairs[comm->rank][rank].received)
            return rank;
        if (comm->receives_from[rank] && !s->pairs[rank][comm->rank].sent)
            return rank;
    }
    return -1;
}

int ncclCommGetAsyncError(struct comm *comm, int *state) {
    TRY;
    fake_advance();
    enter();
    int other = awaited(comm), failed = comm->shared->failed;
    if (!failed && other >= 0 && now() - comm->since > (double)fake_number("FAKE_NCCL_LIMIT", 30)) {
        fail(comm->shared, "rank %d waits for rank %d, which never came", comm->rank, other);
        failed = 6;
    }
    leave();
    int busy = other >= 0 || (comm->finalizing && comm->queued);
    *state = failed ? failed : busy ? IN_PROGRESS : 0;
    comm->settled = *state != IN_PROGRESS;
    return 0;
}

/* ---- what is asked for ---- */

static int ask(const char *function, struct comm *comm, struct stream *stream, struct ask ask) {
    int status = fake_called(function);
    char what[256];
    if (status)
        return status;
    if (!comm->settled || !groups || ask.peer >= comm->ranks || ask.peer == comm->rank || comm->finalizing)
        return 5;
    if (asked.comm && (asked.comm != comm || asked.stream != stream))
        return 5;
    snprintf(what, sizeof what, "%s%s", function, fake_capturing ? " captured" : "");
    fake_write_down(comm->id.text, what, ask.count);
    ask.function = function;
    asked.comm = comm;
    asked.stream = stream;
    static struct ask held;
    uint64_t number = ++comm->asks;
    if (number == 5 && does_wrong("skip"))
        return IN_PROGRESS;
    if (number == 5 && does_wrong("turn"))
        return held = ask, IN_PROGRESS;
    ask.count += number == 5 && does_wrong("size");
    asked.asks = realloc(asked.asks, (asked.count + 2) * sizeof ask);
    asked.asks[asked.count++] = ask;
    if (number == 6 && does_wrong("turn"))
        asked.asks[asked.count++] = held;
    return IN_PROGRESS;
}
#define SUM(name)                                                                                                \
    int name(void *from, void *to, size_t count, int type, int op, struct comm *comm, struct stream *stream) {   \
        (void)from, (void)to;                                                                                    \
        if (type < 6 || type > 9 || op)                                                                          \
            return 4;                                                                                            \
        return ask(__func__, comm, stream, (struct ask){.type = type, .peer = -1, .count = count});              \
    }
SUM(ncclAllReduce)
SUM(ncclReduceScatter)
int ncclAllGather(void *from, void *to, size_t count, int type, struct comm *comm, struct stream *stream) {
    (void)from, (void)to;
    return ask(__func__, comm, stream, (struct ask){.type = type, .peer = -1, .count = count});
}
#define MESSAGE(name)                                                                                    \
    int name(void *at, size_t count, int type, int peer, struct comm *comm, struct stream *stream) {     \
        (void)at;                                                                                        \
        if (peer < 0 || type != 1)                                                                       \
            return 4;                                                                                    \
        return ask(__func__, comm, stream, (struct ask){.type = type, .peer = peer, .count = count});    \
    }
MESSAGE(ncclSend)
MESSAGE(ncclRecv)
int ncclGroupStart(void) {
    groups++;
    return fake_called(__func__);
}
int ncclGroupEnd(void) {
    groups--;
    struct group group = asked;
    memset(&asked, 0, sizeof asked);
    TRY;
    if (!group.comm)
        return 0;
    struct comm *comm = group.comm;
    for (size_t i = 0; i < group.count && !fake_capturing; i++) {
        struct ask *ask = &group.asks[i];
        if (ask->peer < 0)
            comm->connects = 1;
        else
            (is_send(ask) ? comm->sends_to : comm->receives_from)[ask->peer] = 1;
    }
    comm->settled = 0;
    comm->since = now();
    struct group *kept = malloc(sizeof *kept);
    *kept = group;
    fake_queue((struct entry){.kind = GROUP, .stream = group.stream, .group = kept});
    return IN_PROGRESS;
}

/* ---- ends ---- */

int ncclCommAbort(struct comm *comm) {
    fake_write_down("abort", comm->id.text, 0);
    sleep((unsigned)fake_number("FAKE_NCCL_ABORT", 0));
    comm->aborted = 1;
    while (__atomic_load_n(&comm->captured, __ATOMIC_SEQ_CST))
        usleep(1000);
    return fake_called(__func__);
}
int ncclCommFinalize(struct comm *comm) {
    comm->finalizing = 1;
    comm->settled = 0;
    return IN_PROGRESS;
}
int ncclCommDestroy(struct comm *comm) {
    TRY;
    fake_write_down("destroy", comm->id.text, 0);
    if (!comm->settled)
        return 5;
    struct shared *s = comm->shared;
    enter();
    if (++s->left == s->ranks) {
        for (int rank = 1; rank < s->ranks; rank++)
            if (s->posted[rank] != s->posted[0])
                fail(s, "rank 0 asked for %llu collectives, rank %d for %llu", (unsigned long long)s->posted[0], rank,
                     (unsigned long long)s->posted[rank]);
        for (int a = 0; a < s->ranks; a++)
            for (int b = 0; b < s->ranks; b++)
                if (s->pairs[a][b].sent != s->pairs[a][b].received)
                    fail(s, "rank %d sent rank %d %llu messages, of which %llu were received", a, b,
                         (unsigned long long)s->pairs[a][b].sent, (unsigned long long)s->pairs[a][b].received);
        s->ranks = 0;
    }
    leave();
    return 0;
}
const char *ncclGetErrorString(int status) { return status == 3 ? "internal error" : "something else"; }
const char *ncclGetLastError(struct comm *comm) {
    return comm && comm->shared && comm->shared->failed ? comm->shared->error : "net.cc:42 no way";
}
