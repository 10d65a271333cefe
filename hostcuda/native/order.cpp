// Entities, their clocks, and what this thread's device and streams are. See order.h.
#include "order.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

namespace hostcuda {
namespace {

constexpr size_t kMostReports = 2000;  // between two lettings go of the lock

struct Entity {
  std::string name;
  bool is_stream, beside;  // beside the default stream
  Clock clock;
};

struct State {
  std::recursive_mutex lock;
  Callback callback = nullptr;
  std::vector<std::pair<std::string, std::string>> reports;
  Speeds speeds;
  double spent_s[kKinds] = {};
  bool recording = false;
  std::vector<Span> spans;
  int64_t launched = 0;
  int home = 0, devices = 1;
  std::deque<Entity> entities;  // their addresses stay
  std::map<std::pair<int, int64_t>, int> streams;
  int64_t next_stream = 1;
  int main_thread = -1;
  Clock known;  // to any thread: kept beside their clocks, as threads come and go by the hundred
};

State& state() {
  static State* instance = new State();  // never destroyed: threads outlive static objects
  return *instance;
}

thread_local int tls_depth = 0;
thread_local int tls_device = 0;
thread_local int64_t tls_streams[kMaxDevices] = {};
thread_local int tls_entity = -1;

int new_entity(const std::string& name, bool is_stream, bool beside) {
  state().entities.push_back({name, is_stream, beside, {}});
  return static_cast<int>(state().entities.size()) - 1;
}

void record(Kind kind, bool beside, int64_t number, double begin_s, double end_s) {
  auto& spans = state().spans;
  const bool kernel = kind == kKernel || kind == kKernelBeside;
  if (kernel && begin_s == end_s) return;
  if (kernel && !spans.empty() && spans.back().kind == kind && spans.back().end_s == begin_s)
    spans.back().end_s = end_s;
  else
    spans.push_back({kind, beside, number, begin_s, end_s});
}

bool is_autograds() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strncmp(name, "pt_autograd", 11) == 0;
}

}  // namespace

uint64_t Clock::operator[](int entity) const {
  return entity < static_cast<int>(counts.size()) ? counts[entity] : 0;
}

void Clock::join(const Clock& other) {
  if (counts.size() < other.counts.size()) counts.resize(other.counts.size());
  for (size_t i = 0; i < other.counts.size(); ++i) counts[i] = std::max(counts[i], other.counts[i]);
  time_s = std::max(time_s, other.time_s);
}

void Clock::tick(int entity) {
  if (static_cast<int>(counts.size()) <= entity) counts.resize(entity + 1);
  ++counts[entity];
}

Locked::Locked() : held_(state().lock) { ++tls_depth; }

Locked::~Locked() {
  if (--tls_depth) return;
  auto reports = std::exchange(state().reports, {});
  auto callback = state().callback;
  held_.unlock();
  if (callback)
    for (auto& [kind, text] : reports) callback(kind.c_str(), text.c_str());
}

void report(const std::string& kind, const std::string& text) {
  if (state().reports.size() < kMostReports) state().reports.emplace_back(kind, text);
}

void tell(Callback callback) { state().callback = callback; }

Speeds& speeds() { return state().speeds; }

void live_on(int home, int devices) {
  state().home = home, state().devices = devices;
  state().main_thread = thread_entity();
  name_of(state().main_thread) = "the main thread";
}

int home() { return state().home; }
int devices() { return state().devices; }

void check_home(int device, const std::string& what) {
  if (device != home())
    report("foreign", what + " on cuda:" + std::to_string(device) + ", but this rank's device is cuda:" +
                          std::to_string(home()));
}

int current_device() { return tls_device; }
void set_current_device(int device) { tls_device = device; }
int64_t current_stream(int device) { return tls_streams[device]; }
void set_current_stream(int device, int64_t stream) { tls_streams[device] = stream; }

int stream_entity(int device, int64_t stream) {
  auto [it, fresh] = state().streams.try_emplace({device, stream}, -1);
  if (fresh) {
    auto name = stream ? "stream " + std::to_string(stream) : std::string("the default stream");
    it->second = new_entity(name + " of cuda:" + std::to_string(device), true, stream != 0);
  }
  return it->second;
}

int64_t new_stream(int device) {
  int64_t stream = state().next_stream++;
  stream_entity(device, stream);
  return stream;
}

int thread_entity() {
  if (tls_entity < 0 && state().main_thread >= 0 && is_autograds()) tls_entity = state().main_thread;
  if (tls_entity < 0) tls_entity = new_entity("a thread", false, false);
  return tls_entity;
}

Clock& clock_of(int entity) { return state().entities[entity].clock; }
bool is_stream(int entity) { return state().entities[entity].is_stream; }
std::string& name_of(int entity) { return state().entities[entity].name; }
double& spent_s(Kind kind) { return state().spent_s[kind]; }

double ready_s(int entity) {
  return std::max(clock_of(entity).time_s, clock_of(thread_entity()).time_s + speeds().launch_s);
}

int64_t launch(int entity, double seconds, Kind kind, double not_before_s) {
  auto& host = clock_of(thread_entity());
  host.time_s += speeds().launch_s;
  auto& clock = clock_of(entity);
  clock.join(host);
  clock.tick(entity);
  const double begin_s = clock.time_s;
  clock.time_s = std::max(begin_s, not_before_s) + seconds;
  const int64_t number = ++state().launched;
  const bool beside = state().entities[entity].beside;
  if (kind == kKernel && beside) kind = kKernelBeside;
  spent_s(kind) += seconds;
  if (state().recording) record(kind, beside, number, begin_s, clock.time_s);
  return number;
}

void postpone(int entity, Clock& event, int64_t number, double end_s) {
  for (Clock* clock : {&event, &clock_of(entity)}) clock->time_s = std::max(clock->time_s, end_s);
  for (auto span = state().spans.rbegin(); span != state().spans.rend(); ++span)
    if (span->kind == kCollective && span->number == number) span->end_s = std::max(span->end_s, end_s);
}

void record_spans(bool on) {
  state().recording = on;
  if (on) state().spans.clear();
}

const std::vector<Span>& spans() { return state().spans; }

void hear(const Clock& other) {
  clock_of(thread_entity()).join(other);
  state().known.join(other);
}

void act() {
  const int entity = thread_entity();
  clock_of(entity).tick(entity);
  state().known.tick(entity);
}

void synchronize(const Clock& until, const std::string& what) {
  hear(until);
  report("sync", what);
}

void synchronize_device(int device, const std::string& what) {
  for (auto& [key, entity] : state().streams)
    if (key.first == device) hear(clock_of(entity));
  report("sync", what);
}

const Clock& known_to_threads() { return state().known; }

}  // namespace hostcuda
