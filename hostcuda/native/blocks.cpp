// Blocks of memory and the checks of every use of them. See blocks.h.
#include "blocks.h"

#include <algorithm>
#include <map>
#include <utility>

namespace hostcuda {
namespace {

std::map<const char*, Block*>& blocks() {
  static auto* instance = new std::map<const char*, Block*>();
  return *instance;
}

// By owner: uses of freed blocks that may not be over.
std::map<int, std::vector<std::pair<std::string, Use>>>& freed() {
  static auto* instance = new std::map<int, std::vector<std::pair<std::string, Use>>>();
  return *instance;
}

void forget(Block* block) {
  blocks().erase(block->base);
  delete block;
}

std::string describe(const Block& block) {
  return std::string(block.device == kHost ? "pinned" : "device") + " block #" + std::to_string(block.number) + " of " +
      std::to_string(block.size) + " bytes";
}

std::string describe(const Use& use) {
  return use.by + (use.write ? " (write) on " : " (read) on ") + name_of(use.entity);
}

// Uses that a new one makes superfluous: whoever is ordered after it is ordered after them, or has been reported.
void remember(Block& block, Use now) {
  auto outdone = [&](const Use& old) {
    bool covered = now.begin <= old.begin && old.end <= now.end;
    return covered && (now.write || (!old.write && old.entity == now.entity));
  };
  block.uses.erase(std::remove_if(block.uses.begin(), block.uses.end(), outdone), block.uses.end());
  block.uses.push_back(std::move(now));
}

void check(Block& block, Use now) {
  const Clock& clock = clock_of(now.entity);
  for (auto& old : block.uses) {
    const bool apart = old.end <= now.begin || now.end <= old.begin;
    const bool both_read = !old.write && !now.write;
    if (apart || both_read || old.entity == now.entity || clock[old.entity] >= old.count) continue;
    report("race", now.by + (now.write ? " writes " : " reads ") + describe(block) + " on " + name_of(now.entity) +
                       ", not ordered after " + describe(old));
  }
  remember(block, std::move(now));
}

}  // namespace

Block* add_block(void* base, size_t size, int device, int owner) {
  static uint64_t next = 1;
  auto* block = new Block{static_cast<char*>(base), size, device, owner, next++, {}, {}};
  blocks()[block->base] = block;
  return block;
}

Block* block_at(const void* address) {
  auto* at = static_cast<const char*>(address);
  auto it = blocks().upper_bound(at);
  if (it == blocks().begin()) return nullptr;
  Block* block = std::prev(it)->second;
  return at < block->base + block->size ? block : nullptr;
}

bool is_pinned(const void* address) {
  Block* block = block_at(address);
  return block && block->device == kHost;
}

void unpin_block(Block* block) {
  const int entity = thread_entity();
  for (auto& old : block->uses)  // a thread may go on: the memory stays where it is
    if (is_stream(old.entity) && clock_of(entity)[old.entity] < old.count)
      report("early free", describe(*block) + " is unpinned, and " + describe(old) + " may still use it");
  forget(block);
}

void free_block(Block* block) {
  Clock waited;
  for (int entity : block->recorded) waited.join(clock_of(entity));
  for (auto& old : block->uses)
    if (old.entity != block->owner && waited[old.entity] < old.count)
      freed()[block->owner].push_back({describe(*block), old});
  forget(block);
}

void allocate_for(int owner) {
  auto left = std::exchange(freed()[owner], {});
  if (left.empty()) return;
  for (auto& [block, old] : left)
    if (clock_of(owner)[old.entity] < old.count && known_to_threads()[old.entity] < old.count)
      report("early free", "the memory of " + block + ", which has been freed, may be allocated anew for " +
                               name_of(owner) + ", and " + describe(old) + " may still use it");
}

void use(const void* address, size_t bytes, int entity, bool write, const std::string& by) {
  Block* block = bytes ? block_at(address) : nullptr;
  if (!block) return;
  const size_t begin = static_cast<const char*>(address) - block->base;
  check(*block, {begin, std::min(begin + bytes, block->size), entity, clock_of(entity)[entity], write, by});
}

void use_on_host(const void* address, size_t bytes, bool write, const std::string& by) {
  act();
  use(address, bytes, thread_entity(), write, by);
}

}  // namespace hostcuda
