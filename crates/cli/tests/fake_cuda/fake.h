/* What the parts of the fake have in common. */

#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>
#include <stdint.h>

/* A number from the environment. */
size_t fake_number(const char *variable, size_t otherwise);
/* Counts a call of a function, and gives the status that the environment wants it to have. */
int fake_called(const char *function);
/* Ends a function with that status, if there is one. */
#define TRY                                 \
    do {                                    \
        int status = fake_called(__func__); \
        if (status)                         \
            return status;                  \
    } while (0)
/* Writes a line to the file of this rank. */
void fake_write_down(const char *what, const char *more, unsigned long long n);

/* All copies of the library have these in common: the first that is loaded has them. */
extern int fake_capturing, fake_stuck;

/* ---- device.c: streams that do one thing after the other, and wait for events and for other ranks ---- */

struct stream {
    /* Whether it has copies to the device that nobody waited for. */
    int behind;
    struct entry *first, *last;
    struct stream *next;
    /* Whether it is among those that get on. */
    int listed;
};
struct event {
    struct stream *stream;
    uint64_t version, reached;
};
struct graph;

/* Something that a stream comes to. The first three are what the driver queues. */
enum kind { RECORD, WAIT, REACHED, PASSED, GROUP };
struct entry {
    enum kind kind;
    struct stream *stream;
    struct event *event;
    uint64_t version;
    volatile void *at;
    uint64_t mark;
    struct group *group;
    struct entry *next;
};

struct stream *fake_new_stream(void);
/* It is not looked after any more. What names it may stay. */
void fake_end_stream(struct stream *stream);
/* Queues an entry, or adds it to the graph that is captured. A copy is made. */
void fake_queue(struct entry entry);
/* Lets the device do what it can. */
void fake_advance(void);
/* Whether a stream, or where it is null every stream, has nothing to do. */
int fake_idle(struct stream *stream);
/* Whether an event has come. */
int fake_came(struct event *event);
struct graph *fake_begin_graph(void);
void fake_replay(struct graph *graph, struct stream *stream);
/* The graph runs no more. */
void fake_end_graph(struct graph *graph);
/* Calls on the device exclude each other. */
void fake_lock(void);
void fake_unlock(void);

/* ---- nccl.c ---- */

/* A stream has come to this group: gives whether all whom it needs have come too. */
int fake_group_done(struct group *group);
/* The group is queued: its calls are compared with those of other ranks. A captured one is every time that its graph runs. */
struct group *fake_post_group(struct group *group);
/* This many more graphs have the group; fewer where it is negative. */
void fake_hold_group(struct group *group, int graphs);

#endif
