// What the ranks' kernels (comm.cu), the host (src/gpu/ranks/link.rs) and the model of the protocol
// (tests/comm_protocol.rs) agree on. Rust reads the numbers out of this text: NAME = literal, at the start of a line.
//
// Each rank has a window, a piece of its memory that all ranks' GPUs reach. Block b of a collective is channel b: it
// talks to block b of the other ranks and to no other block. What is sent goes in chunks; all ranks cut a message into
// the same chunks. The chunks of a channel are numbered: the epoch. Chunk e uses buffer e % COMM_BUFFERS of its
// channel, in the receiver's window, at the sender's slot.
//
// The one rule: a rank ends chunk e of a channel only when it has something of chunk e from every other rank, and
// starts chunk e only when all its threads are done with chunk e - 1. So whoever has ended e knows that nobody reads
// e - 1 any more, and two buffers are enough, whatever the sizes and algorithms of the chunks.
#pragma once

// clang-format off
enum : unsigned {
COMM_MAX_RANKS = 8,
COMM_CHANNELS = 32,
COMM_BUFFERS = 2,
COMM_SLOT_BYTES = 16384,       // of one chunk, from one rank to another
COMM_LINE_BYTES = 128,         // words that different GPUs write lie on lines of their own
COMM_AFTER_WRAP = 2,           // the epoch after 0xffffffff: 0 says that nothing was ever written, and epochs stay
                               // even and odd by turns
// A window: the line of the report, then the channels. A channel: the line of its last epoch, then the buffers. A
// buffer, offsets:
COMM_FLAGS = 0,                // [COMM_MAX_RANKS] lines: epoch of what that rank holds ready in its `ready`; written by
                               // that rank
COMM_PUSHED = 1024,            // [COMM_MAX_RANKS] slots: partial sums, zero where nothing is; written by that rank,
                               // zeroed again by the owner of the window
COMM_GATHERED = 132096,        // [COMM_MAX_RANKS] slots: the same, for finished sums (two-shot)
COMM_WORDS = 263168,           // [COMM_MAX_RANKS] slots of packets {low, epoch, high, epoch}
COMM_READY = 394240,           // a slot: what the owner of the window holds ready for others to load
COMM_BUFFER_BYTES = 410624,
COMM_CHANNEL_BYTES = 821376,
COMM_WINDOW_BYTES = 26284160,
// The word that ends all waiting of a rank.
COMM_POISON_TIMEOUT = 1,       // by a kernel: it waited too long, the record says for what
COMM_POISON_HOST = 2,          // by the host: another rank failed
COMM_LOOKS = 1024,             // at a word, between two looks at the clock and the poison
// What a rank waits for, in the record.
COMM_PHASE_PUSH = 1,
COMM_PHASE_REDUCE = 2,
COMM_PHASE_GATHER = 3,
COMM_PHASE_FLAG = 4,
COMM_PHASE_WORDS = 5,
COMM_PHASE_PING = 6,
};
// clang-format on

static_assert(COMM_PUSHED == COMM_FLAGS + COMM_MAX_RANKS * COMM_LINE_BYTES, "layout");
static_assert(COMM_GATHERED == COMM_PUSHED + COMM_MAX_RANKS * COMM_SLOT_BYTES, "layout");
static_assert(COMM_WORDS == COMM_GATHERED + COMM_MAX_RANKS * COMM_SLOT_BYTES, "layout");
static_assert(COMM_READY == COMM_WORDS + COMM_MAX_RANKS * COMM_SLOT_BYTES, "layout");
static_assert(COMM_BUFFER_BYTES == COMM_READY + COMM_SLOT_BYTES, "layout");
static_assert(COMM_CHANNEL_BYTES == COMM_LINE_BYTES + COMM_BUFFERS * COMM_BUFFER_BYTES, "layout");
static_assert(COMM_WINDOW_BYTES == COMM_LINE_BYTES + COMM_CHANNELS * COMM_CHANNEL_BYTES, "layout");
