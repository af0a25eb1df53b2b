/*
 * ggml's RPC back end, whose client ends the process when a worker goes away. This file includes it and gives
 * its GGML_ABORT another meaning in the places that speak to a worker: the answer that did not come is zeros,
 * and the failure is counted. A device that is lost then answers zeros to everything until it is closed; who
 * computed on it asks dflash_rpc_failures() and throws the result away.
 *
 * Failed checks of other kinds, those of the server among them, still end the process.
 */

#include "ggml-rpc.h"
#include "ggml-impl.h"
#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "transport.h"

#include <atomic>
#include <cstring>

/* Found by name where the abort's scope has no variable of that name. */
struct dflash_nothing {};
static dflash_nothing msg_ptr, sock;

static std::atomic<int> dflash_n_failures(0);

extern "C" {
GGML_BACKEND_API int dflash_rpc_failures(void);

int dflash_rpc_failures(void) {
    return dflash_n_failures.load();
}
}

static bool dflash_is_loss(const char * format) {
    return strncmp(format, "Remote RPC server", 17) == 0 || strncmp(format, "Failed to connect", 17) == 0 ||
           strncmp(format, "RPC handshake", 13) == 0;
}

static void dflash_answer_zeros(const dflash_nothing &) {}

template <typename Message> static void dflash_answer_zeros(const Message & message) {
    if (message->output != nullptr) {
        memset(message->output, 0, message->output_size);
    }
}

/* A socket that nobody can be reached through stands in for one that was never connected. */
static bool dflash_hang_up(const socket_ptr & socket) {
    return socket != nullptr;
}

static bool dflash_hang_up(socket_ptr & socket) {
    if (socket == nullptr) {
        socket = socket_t::create_server("127.0.0.1", 0);
    }
    return socket != nullptr;
}

template <typename Message, typename Socket, typename... Values>
static void dflash_rpc_abort(
    Message & message, Socket & socket, const char * file, int line, const char * format, Values... values) {
    if (!dflash_is_loss(format) || !dflash_hang_up(socket)) {
        ggml_abort(file, line, format, values...);
    }
    dflash_answer_zeros(message);
    dflash_n_failures++;
}

/* Nothing here speaks to a worker. */
template <typename... Values>
[[noreturn]] static void dflash_rpc_abort(
    dflash_nothing &, dflash_nothing &, const char * file, int line, const char * format, Values... values) {
    ggml_abort(file, line, format, values...);
}

#undef GGML_ABORT
#define GGML_ABORT(...) dflash_rpc_abort(msg_ptr, sock, __FILE__, __LINE__, __VA_ARGS__)

#include "ggml-rpc.cpp"
