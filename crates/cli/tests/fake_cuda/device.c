/* Streams of the fake device. Kernels and copies take no time; what takes time is waiting for other ranks and for events. A thread lets
 * the device get on while the host does something else. */

#include "fake.h"
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

struct graph {
    struct entry *first, *last;
};

/* All copies of the library have one machine. */
struct machine {
    pthread_mutex_t lock;
    struct stream *streams;
    struct graph *captured;
    int ticks;
} fake_machine = {.lock = PTHREAD_MUTEX_INITIALIZER};

void fake_lock(void) { pthread_mutex_lock(&fake_machine.lock); }
void fake_unlock(void) { pthread_mutex_unlock(&fake_machine.lock); }

static void list(struct stream *stream) {
    stream->listed = 1;
    stream->next = fake_machine.streams;
    fake_machine.streams = stream;
}

struct stream *fake_new_stream(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    fake_lock();
    list(stream);
    fake_unlock();
    return stream;
}

static int run(struct entry *entry) {
    switch (entry->kind) {
    case RECORD:
        if (entry->event->reached < entry->version)
            entry->event->reached = entry->version;
        return 1;
    case WAIT: return entry->event->reached >= entry->version;
    case REACHED: *(volatile uint32_t *)entry->at = (uint32_t)entry->mark; return 1;
    case PASSED:
        fake_called("passed");
        if (!fake_stuck)
            *(volatile uint64_t *)entry->at = entry->mark;
        return 1;
    case GROUP: return fake_group_done(entry->group);
    }
    return 1;
}

static void advance(void) {
    for (int moved = 1; moved && !fake_stuck;) {
        moved = 0;
        for (struct stream *s = fake_machine.streams; s; s = s->next)
            while (s->first && !fake_stuck && run(s->first)) {
                struct entry *done = s->first;
                s->first = done->next;
                if (!s->first)
                    s->last = NULL;
                free(done);
                moved = 1;
            }
    }
}

void fake_end_stream(struct stream *stream) {
    fake_lock();
    advance();
    for (struct stream **at = &fake_machine.streams; *at && !stream->first; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            stream->listed = 0;
            break;
        }
    fake_unlock();
}

static int idle(struct stream *stream) {
    if (stream)
        return !stream->first;
    for (struct stream *s = fake_machine.streams; s; s = s->next)
        if (s->first)
            return 0;
    return 1;
}

static void *tick(void *nothing) {
    (void)nothing;
    for (;;) {
        fake_lock();
        advance();
        int rest = idle(NULL);
        fake_unlock();
        usleep(rest ? 2000 : 200);
    }
    return NULL;
}

void fake_advance(void) {
    fake_lock();
    advance();
    fake_unlock();
}

int fake_idle(struct stream *stream) {
    fake_lock();
    advance();
    int result = idle(stream);
    fake_unlock();
    return result;
}

int fake_came(struct event *event) {
    fake_lock();
    advance();
    int came = event->reached >= event->version;
    fake_unlock();
    return came;
}

/* Gives events their versions: an event that is recorded again is another one. */
static void append(struct entry entry) {
    struct stream *s = entry.stream;
    if (entry.kind == RECORD) {
        entry.version = ++entry.event->version;
        entry.event->stream = s;
    }
    if (entry.kind == WAIT)
        entry.version = entry.event->version;
    if (!s) {
        /* The stream that has no name never lags. */
        run(&entry);
        return;
    }
    /* A graph may have been captured from it. */
    if (!s->listed)
        list(s);
    if (entry.kind == GROUP)
        entry.group = fake_post_group(entry.group);
    struct entry *copy = malloc(sizeof *copy);
    *copy = entry;
    copy->next = NULL;
    if (s->last)
        s->last->next = copy;
    else
        s->first = copy;
    s->last = copy;
    if (entry.kind == GROUP && !fake_machine.ticks) {
        pthread_t thread;
        fake_machine.ticks = !pthread_create(&thread, NULL, tick, NULL);
    }
}

void fake_queue(struct entry entry) {
    fake_lock();
    if (fake_capturing) {
        struct graph *graph = fake_machine.captured;
        struct entry *copy = malloc(sizeof *copy);
        *copy = entry;
        copy->next = NULL;
        if (graph->last)
            graph->last->next = copy;
        else
            graph->first = copy;
        graph->last = copy;
        if (entry.kind == GROUP)
            fake_hold_group(entry.group, 1);
    } else {
        append(entry);
        advance();
    }
    fake_unlock();
}

struct graph *fake_begin_graph(void) { return fake_machine.captured = calloc(1, sizeof(struct graph)); }

void fake_replay(struct graph *graph, struct stream *stream) {
    fake_lock();
    struct event *begun = calloc(1, sizeof *begun);
    append((struct entry){.kind = RECORD, .stream = stream, .event = begun});
    struct stream *streams[4096];
    size_t count = 0;
    for (struct entry *e = graph->first; e; e = e->next) {
        size_t i = 0;
        while (i < count && streams[i] != e->stream)
            i++;
        if (i == count && e->stream != stream && count < sizeof streams / sizeof *streams) {
            streams[count++] = e->stream;
            append((struct entry){.kind = WAIT, .stream = e->stream, .event = begun});
        }
        append(*e);
    }
    for (size_t i = 0; i < count; i++) {
        struct event *ended = calloc(1, sizeof *ended);
        append((struct entry){.kind = RECORD, .stream = streams[i], .event = ended});
        append((struct entry){.kind = WAIT, .stream = stream, .event = ended});
    }
    advance();
    fake_unlock();
}

void fake_end_graph(struct graph *graph) {
    fake_lock();
    for (struct entry *e = graph->first; e; e = e->next)
        if (e->kind == GROUP)
            fake_hold_group(e->group, -1);
    graph->first = graph->last = NULL;
    fake_unlock();
}
