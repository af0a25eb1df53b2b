/*
 * The sockets of ggml's RPC back end, which wait for ever. This file includes them and gives setsockopt, send and
 * recv another meaning there: a machine that is gone is noticed after a minute, by engines and by workers, and an
 * engine waits no longer than dflash_rpc_timeout() says. What breaks off there is a failure like any other; the
 * connection is shut down with it, since an answer that comes late would be taken for the next one.
 */

#include "transport.h"
#include "ggml-backend.h"
#include "ggml-impl.h"

extern "C" {
GGML_BACKEND_API void dflash_rpc_timeout(int seconds);
}

#ifdef _WIN32

void dflash_rpc_timeout(int seconds) {
    GGML_UNUSED(seconds);
}

#else

#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>

/* Of the thread that connects; a worker accepts on threads that never set it, and waits for its next engine. */
static thread_local int dflash_timeout_s = 0;

void dflash_rpc_timeout(int seconds) {
    dflash_timeout_s = seconds;
}

static void dflash_set(int fd, int level, int name, int value) {
    setsockopt(fd, level, name, &value, sizeof(value));
}

static void dflash_watch(int fd) {
    dflash_set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef TCP_KEEPIDLE
    dflash_set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 30);
#endif
#ifdef TCP_KEEPINTVL
    dflash_set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
    dflash_set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
#endif
    struct timeval limit = {};
    limit.tv_sec = dflash_timeout_s;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

/* Every socket that carries messages is given TCP_NODELAY first. */
static int dflash_setsockopt(int fd, int level, int name, const void * value, socklen_t size) {
    if (level == IPPROTO_TCP && name == TCP_NODELAY) {
        dflash_watch(fd);
    }
    return setsockopt(fd, level, name, value, size);
}

static ssize_t dflash_moved(int fd, ssize_t n) {
    if (n < 0) {
        GGML_LOG_DEBUG("%s: %s\n", __func__, strerror(errno));
        shutdown(fd, SHUT_RDWR);
    }
    return n;
}

/* With a time limit a signal interrupts these calls whatever its handler asks for. */
static ssize_t dflash_send(int fd, const void * data, size_t size, int flags) {
    ssize_t n;
    do {
        n = send(fd, data, size, flags);
    } while (n < 0 && errno == EINTR);
    return dflash_moved(fd, n);
}

static ssize_t dflash_recv(int fd, void * data, size_t size, int flags) {
    ssize_t n;
    do {
        n = recv(fd, data, size, flags);
    } while (n < 0 && errno == EINTR);
    return dflash_moved(fd, n);
}

#define setsockopt(...) dflash_setsockopt(__VA_ARGS__)
#define send(fd, data, size, flags) dflash_send(fd, data, size, flags)
#define recv(fd, data, size, flags) dflash_recv(fd, data, size, flags)

#endif

#include "transport.cpp"
