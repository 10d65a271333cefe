// Memory that streams use: blocks on the device and pinned ones on the host, with who used which bytes of them last.
//
// A use that is not ordered after an earlier one of the same bytes, where one of the two writes, is a "race". Memory that
// is unpinned, or allocated anew, while somebody may still use it has been an "early free". All of this is called with
// `Locked` held.
#pragma once

#include "order.h"

#include <set>

namespace hostcuda {

struct Use {
  size_t begin, end;  // bytes of the block
  int entity;
  uint64_t count;  // of the entity
  bool write;
  std::string by;
};

constexpr int kHost = -1;

struct Block {
  char* base;
  size_t size;
  int device;  // or kHost
  int owner;   // the entity that it was allocated for; who may get its memory next
  uint64_t number;
  std::vector<Use> uses;
  std::set<int> recorded;  // by `record_stream`: its memory waits for these entities
};

Block* add_block(void* base, size_t size, int device, int owner);
// The block that an address lies in, or null.
Block* block_at(const void* address);
bool is_pinned(const void* address);
// The calling thread makes pinned memory pageable again.
void unpin_block(Block* block);
// Nobody holds a block any more. Its owner's next allocation may get the memory: by then all uses must be over for the
// owner, or for any thread: whoever held a reference has dropped it, and what that thread has waited for is over.
void free_block(Block* block);
void allocate_for(int owner);

void use(const void* address, size_t bytes, int entity, bool write, const std::string& by);
// The same by the calling thread itself; memory of no block is of no interest.
void use_on_host(const void* address, size_t bytes, bool write, const std::string& by);

}  // namespace hostcuda
