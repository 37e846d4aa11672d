#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep::transport {

/// What the layer above says of a message; sender and receiver must agree. Tags match messages to receives.
struct MessageKind {
  size_t bytes = 0;
  uint32_t type = 0;  // of the elements, in the words of the layer above
};

}  // namespace lockstep::transport

/// What a rank keeps in its arena for the messages that it sends. Part of the protocol between processes;
/// only MessageChannel touches it.
namespace lockstep::transport::layout {

/// Messages up to this size travel in the mailbox.
constexpr size_t kInlineBytes = 8192;
constexpr size_t kMailboxSlots = 8;
/// A ring of chunks, for larger messages from memory that the receiver can't see.
constexpr size_t kRingChunkBytes = size_t{128} << 10;
constexpr size_t kRingChunks = 4;

enum class TransferState : uint32_t {
  kOffered,  // by the sender; no rank has asked for it yet
  kClaimed,  // by the receiver, which reads it
  kDone,     // the receiver has all of it
  kRefused,  // by the receiver: another kind than expected, or it gave up
  kGivenUp,  // by the sender, before the receiver had all
  kDropped,  // the receiver has seen that, and uses it no more
};

inline constexpr uint64_t kReceiverGaveUp = ~uint64_t{0};

/// A message that does not travel in the mailbox. The state goes from kOffered to one of the final states by
/// compare-and-swap, so that sender and receiver agree how it ended.
struct Transfer {
  alignas(64) std::atomic<TransferState> state;
  uint32_t direct;  // the data lie in the sender's arena, at segment and offset; else through a ring
  uint32_t segment;
  uint64_t offset;
  uint64_t expected_bytes;  // by the receiver, before kRefused; kReceiverGaveUp if that is why
  uint32_t expected_type;
  std::atomic<uint64_t> ring;                // packed reference, once the sender has made it
  alignas(64) std::atomic<uint64_t> filled;  // bytes, by the sender
  alignas(64) std::atomic<uint64_t> taken;   // bytes, by the receiver
};

/// One side's step; false if the other side was faster with another one.
inline bool change(Transfer& transfer, TransferState from, TransferState to) {
  return transfer.state.compare_exchange_strong(from, to, std::memory_order_acq_rel);
}

struct Message {
  int64_t tag;
  uint64_t bytes;
  uint64_t transfer;  // packed reference in the sender's arena; 0: the data stand in the mailbox
  uint32_t type;
};

/// The messages of one sender for one receiver, in order.
struct Mailbox {
  alignas(64) std::atomic<uint64_t> sent;   // messages, by the sender
  alignas(64) std::atomic<uint64_t> taken;  // messages, by the receiver
  alignas(64) std::array<Message, kMailboxSlots> messages;
  alignas(64) std::array<std::array<std::byte, kInlineBytes>, kMailboxSlots> payloads;
};

}  // namespace lockstep::transport::layout
