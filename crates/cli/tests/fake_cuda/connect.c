/* Connects a rank with others as `NcclWorld::connect` does, over the strict NCCL and without the rest of the executor:
 *
 *   connect RANK NAME:MEMBER,MEMBER... [NAME:FROM>TO]...
 *
 * Each argument is a connection, a group of ranks or a stream of messages, in the order in which every rank connects. A rank joins the
 * communicators that it is a member of, then the first message of every stream is sent. What NCCL says of a failure goes to stderr. */

#include "nccl.c"

static void settle(struct comm *comm, struct stream *stream) {
    int state = IN_PROGRESS;
    while (state == IN_PROGRESS || (stream && !fake_idle(stream))) {
        ncclCommGetAsyncError(comm, &state);
        if (state && state != IN_PROGRESS) {
            fprintf(stderr, "%s\n", ncclGetLastError(comm));
            exit(1);
        }
        usleep(1000);
    }
}

/* The members that an argument names; how many there are. */
static int members(const char *connection, int *out) {
    int count = 0;
    for (const char *at = strrchr(connection, ':'); at && count < MEMBERS; at = strpbrk(at + 1, ",>"))
        out[count++] = atoi(at + 1);
    return count;
}

int main(int count, char **args) {
    struct comm *comms[COMMS] = {0};
    struct stream *stream = fake_new_stream();
    union {
        struct config config;
        char room[48];
    } options = {.config = {48, 0xcafebeef, 21700, 0}};
    if (count < 2 || count > COMMS)
        return 2;
    int me = atoi(args[1]), byte = 0;
    for (int i = 2; i < count; i++) {
        int ranks[MEMBERS], size = members(args[i], ranks), index = 0;
        struct id id = {0};
        while (index < size && ranks[index] != me)
            index++;
        if (index == size)
            continue;
        snprintf(id.text, sizeof id.text, "%s", args[i]);
        if (ncclCommInitRankConfig(&comms[i], size, id, index, &options.config) != IN_PROGRESS)
            return 3;
        settle(comms[i], NULL);
    }
    for (int i = 2; i < count; i++) {
        int ranks[MEMBERS];
        if (!comms[i] || !strchr(args[i], '>'))
            continue;
        members(args[i], ranks);
        ncclGroupStart();
        if ((ranks[0] == me ? ncclSend(&byte, 4, 1, 1, comms[i], stream) : ncclRecv(&byte, 4, 1, 0, comms[i], stream)) != IN_PROGRESS)
            return 3;
        ncclGroupEnd();
        settle(comms[i], stream);
    }
    for (int i = 2; i < count; i++)
        if (comms[i]) {
            ncclCommFinalize(comms[i]);
            settle(comms[i], NULL);
            ncclCommDestroy(comms[i]);
        }
    return 0;
}
