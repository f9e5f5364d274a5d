/* A server with a known truth, to measure load generators against.
 *
 * It answers every POST with a stream of server-sent events: one token an event, one event a chunk,
 * and all streams step at the same instants, as the requests of a batch do in an engine. A request
 * gets its first token at the first step that is at least `ttft_ms` after its last byte arrived.
 * What it did is its own account: GET /truth?last=N gives means over the last N requests that came
 * (0 for all), so that a client's warm-up is no part of them, and how late its steps were; POST
 * /reset, to be sent while nothing runs, forgets both. Usage comes to those who ask with
 * `include_usage`. GET /v1/models and /server_info answer what clients ask first.
 *
 *     cc -O2 -o paced_server benchmarks/paced_server.c
 *     ./paced_server PORT STEP_MS TTFT_MS [STYLE]     STYLE: completions (default) or native
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MOST_CONNECTIONS 65536
#define REQUEST_BYTES (1 << 14)
#define BACKLOG 4096

typedef struct {
    int is_open, is_active, wanted, sent, num_prompt, wants_usage;
    size_t have, room, pending, pending_at;
    char *request, *unsent;
    long place;
} Connection;

typedef struct {
    double arrived_s, first_s, last_s;
    int tokens, is_done;
} Served;

typedef struct {
    long steps, blocked;
    double late_s, most_late_s, drain_s, most_drain_s;
} Truth;

static Connection connections[MOST_CONNECTIONS];
static int active[MOST_CONNECTIONS], num_active, poller, is_native;
static double step_s, ttft_s;
static Truth truth;
static Served *served;
static long num_served, room_served;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void drop(int fd) {
    Connection *c = &connections[fd];
    for (int i = 0; c->is_active && i < num_active; i++)
        if (active[i] == fd) active[i--] = active[--num_active], c->is_active = 0;
    free(c->request);
    free(c->unsent);
    memset(c, 0, sizeof *c);
    close(fd);
}

/* Bytes that the socket does not take wait for EPOLLOUT; the truth counts them as blocked. */
static void give(int fd, const char *bytes, size_t length) {
    Connection *c = &connections[fd];
    size_t done = 0;
    if (!c->pending) {
        ssize_t n = send(fd, bytes, length, MSG_NOSIGNAL);
        done = n > 0 ? (size_t)n : 0;
    }
    if (done == length) return;
    truth.blocked++;
    c->unsent = realloc(c->unsent, c->pending + length - done);
    memcpy(c->unsent + c->pending, bytes + done, length - done);
    c->pending += length - done;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
}

static void flush_unsent(int fd) {
    Connection *c = &connections[fd];
    ssize_t n = send(fd, c->unsent, c->pending, MSG_NOSIGNAL);
    if (n <= 0) return;
    memmove(c->unsent, c->unsent + n, c->pending - (size_t)n);
    c->pending -= (size_t)n;
    if (c->pending) return;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
}

static int as_chunk(char *out, const char *event) {
    return sprintf(out, "%zx\r\n%s\r\n", strlen(event), event);
}

static void token(int fd, double at) {
    static const char *heading =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    Connection *c = &connections[fd];
    Served *it = &served[c->place];
    char event[512], out[2048];
    int is_last = ++c->sent == c->wanted, n = 0;
    if (c->sent == 1) {
        n = sprintf(out, "%s", heading);
        it->first_s = at;
    }
    if (is_native)
        sprintf(event,
                "data: {\"text\": \" a\", \"output_ids\": [5], \"meta_info\": {\"id\": \"%d\", \"prompt_tokens\": %d, "
                "\"completion_tokens\": %d, \"finish_reason\": %s}}\n\n",
                fd, c->num_prompt, c->sent, is_last ? "{\"type\": \"length\"}" : "null");
    else
        sprintf(event,
                "data: {\"id\": \"cmpl-%d\", \"object\": \"text_completion\", \"created\": 1, \"model\": \"paced\", "
                "\"choices\": [{\"index\": 0, \"text\": \" a\", \"logprobs\": null, \"finish_reason\": %s}]}\n\n",
                fd, is_last ? "\"length\"" : "null");
    n += as_chunk(out + n, event);
    if (is_last) {
        if (!is_native && c->wants_usage) {
            sprintf(event,
                    "data: {\"object\": \"text_completion\", \"choices\": [], \"usage\": {\"prompt_tokens\": %d, "
                    "\"completion_tokens\": %d, \"total_tokens\": %d}}\n\n",
                    c->num_prompt, c->sent, c->num_prompt + c->sent);
            n += as_chunk(out + n, event);
        }
        n += as_chunk(out + n, "data: [DONE]\n\n");
        n += sprintf(out + n, "0\r\n\r\n");
        it->is_done = 1;
    }
    it->tokens++;
    it->last_s = at;
    give(fd, out, (size_t)n);
}

static void step(double due) {
    double begun = now();
    truth.steps++;
    truth.late_s += begun - due;
    if (begun - due > truth.most_late_s) truth.most_late_s = begun - due;
    for (int i = 0; i < num_active; i++) {
        Connection *c = &connections[active[i]];
        if (!c->sent && begun - served[c->place].arrived_s < ttft_s) continue;
        token(active[i], now());
        if (c->sent == c->wanted) c->is_active = 0, active[i--] = active[--num_active];
    }
    double took = now() - begun;
    truth.drain_s += took;
    if (took > truth.most_drain_s) truth.most_drain_s = took;
}

static void say(int fd, const char *body) {
    char out[2048];
    int n = sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                    strlen(body), body);
    give(fd, out, (size_t)n);
}

static void tell_truth(int fd, long last) {
    char body[1024];
    long first = last > 0 && last < num_served ? num_served - last : 0, done = 0, tokens = 0;
    double ttft = 0, tpot = 0, begun_s = first < num_served ? served[first].arrived_s : 0, ended_s = begun_s;
    for (Served *it = served + first; it < served + num_served; it++) {
        tokens += it->tokens;
        if (it->last_s > ended_s) ended_s = it->last_s;
        if (!it->is_done) continue;
        done++;
        ttft += it->first_s - it->arrived_s;
        tpot += it->tokens > 1 ? (it->last_s - it->first_s) / (it->tokens - 1) : 0;
    }
    long r = done ? done : 1, s = truth.steps ? truth.steps : 1;
    sprintf(body,
            "{\"requests\": %ld, \"tokens\": %ld, \"mean_ttft_ms\": %.4f, \"mean_tpot_ms\": %.5f, "
            "\"span_s\": %.6f, \"late_mean_ms\": %.4f, \"late_max_ms\": %.3f, "
            "\"drain_mean_ms\": %.3f, \"drain_max_ms\": %.3f, \"blocked\": %ld}",
            done, tokens, ttft / r * 1e3, tpot / r * 1e3, ended_s - begun_s, truth.late_s / s * 1e3,
            truth.most_late_s * 1e3, truth.drain_s / s * 1e3, truth.most_drain_s * 1e3, truth.blocked);
    say(fd, body);
}

static int number_after(const char *text, const char *key, int otherwise) {
    const char *found = strstr(text, key);
    return found ? atoi(found + strlen(key) + strspn(found + strlen(key), "\": ")) : otherwise;
}

static void generate(int fd, const char *body, size_t length) {
    Connection *c = &connections[fd];
    int asked = number_after(body, "max_completion_tokens", 0);
    asked = asked ? asked : number_after(body, "max_new_tokens", 0);
    asked = asked ? asked : number_after(body, "max_tokens", 16);
    c->wanted = asked < 1 ? 1 : asked;
    c->num_prompt = (int)(length / 4);
    c->wants_usage = strstr(body, "include_usage") != NULL;
    c->sent = 0;
    if (num_served == room_served) {
        room_served = room_served ? 2 * room_served : 1 << 16;
        served = realloc(served, (size_t)room_served * sizeof *served);
        if (!served) exit(1);
    }
    c->place = num_served++;
    served[c->place] = (Served){.arrived_s = now()};
    c->is_active = 1;
    active[num_active++] = fd;
}

static void answer(int fd, const char *request, const char *body, size_t length) {
    if (!strncmp(request, "GET /truth", 10)) tell_truth(fd, number_after(request, "last=", 0));
    else if (!strncmp(request, "GET /v1/models", 14)) say(fd, "{\"object\": \"list\", \"data\": [{\"id\": \"paced\"}]}");
    else if (!strncmp(request, "POST /reset", 11)) memset(&truth, 0, sizeof truth), num_served = 0, say(fd, "{}");
    else if (!strncmp(request, "GET ", 4)) say(fd, "{}");
    else generate(fd, body, length);
}

/* Takes every whole request off the front of what has arrived. */
static void take_requests(int fd) {
    Connection *c = &connections[fd];
    for (char *end; c->have && (end = memmem(c->request, c->have, "\r\n\r\n", 4));) {
        *end = 0;
        char *said = strcasestr(c->request, "content-length:");
        size_t length = said ? strtoul(said + 15, NULL, 10) : 0, head = (size_t)(end - c->request) + 4;
        *end = '\r';
        if (c->have < head + length) return;
        char kept = c->request[head + length];
        c->request[head + length] = 0;
        answer(fd, c->request, c->request + head, length);
        c->request[head + length] = kept;
        c->have -= head + length;
        memmove(c->request, c->request + head + length, c->have);
    }
}

static void readable(int fd) {
    Connection *c = &connections[fd];
    if (c->room - c->have < REQUEST_BYTES) {
        c->room = c->room * 2 + REQUEST_BYTES;
        c->request = realloc(c->request, c->room + 1);
    }
    ssize_t n = recv(fd, c->request + c->have, c->room - c->have, 0);
    if (n > 0) {
        c->have += (size_t)n;
        take_requests(fd);
    } else if (n == 0 || errno != EAGAIN) {
        drop(fd);
    }
}

static void welcome(int listener) {
    for (int fd, one = 1; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        if (fd >= MOST_CONNECTIONS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connections[fd].is_open = 1;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static int listening(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, length) || listen(fd, BACKLOG)) {
        perror("paced_server");
        exit(1);
    }
    getsockname(fd, (struct sockaddr *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

static int ticking(double first_s) {
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct itimerspec every = {0};
    every.it_value.tv_sec = (time_t)first_s;
    every.it_value.tv_nsec = (long)((first_s - (double)(time_t)first_s) * 1e9);
    every.it_interval.tv_sec = (time_t)step_s;
    every.it_interval.tv_nsec = (long)((step_s - (double)(time_t)step_s) * 1e9 + 0.5);
    timerfd_settime(fd, TFD_TIMER_ABSTIME, &every, NULL);
    return fd;
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "usage: paced_server PORT STEP_MS TTFT_MS [native]\n"), 2;
    step_s = atof(argv[2]) / 1e3;
    ttft_s = atof(argv[3]) / 1e3;
    is_native = argc > 4 && !strcmp(argv[4], "native");
    poller = epoll_create1(0);
    double due = now() + step_s;
    int listener = listening(atoi(argv[1])), timer = ticking(due);
    int watched[] = {listener, timer};
    for (int i = 0; i < 2; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = watched[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, watched[i], &event);
    }
    for (;;) {
        struct epoll_event events[1024];
        int n = epoll_wait(poller, events, 1024, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            uint64_t ticks;
            if (fd == listener) welcome(listener);
            else if (fd == timer && read(timer, &ticks, sizeof ticks) > 0)
                for (; ticks--; due += step_s) step(due);
            else if (fd != timer && (events[i].events & EPOLLOUT)) flush_unsent(fd);
            else if (fd != timer && connections[fd].is_open) readable(fd);
        }
    }
}
