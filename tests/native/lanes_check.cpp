// Each function of lanes.h beside a loop over single numbers. Prints the names of those that differ; test_lanes.py.
#include <cmath>
#include <cstdio>
#include <limits>

#include "lanes.h"

using namespace splat;
namespace {

uint32_t state = 2463534242u;
uint32_t bits() {
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state;
}
template <class T>
T number() {  // of either sign, over eight orders of magnitude; now and then 0 or NaN
  const uint32_t kind = bits() % 32;
  if (kind == 0) return T(0);
  if (kind == 1) return std::numeric_limits<T>::quiet_NaN();
  return T((bits() & 1 ? -1.0 : 1.0) * std::pow(10.0, double(bits() % 8000) / 1000.0 - 4.0));
}
template <class T>
bool same(T a, T b) { return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }

int failures = 0;
void expect(bool holds, const char* name) {
  if (holds) return;
  std::printf("%s\n", name);
  ++failures;
}

// Halves are added until one number is left.
template <class T>
T folded(const T* x) {
  T a[16];
  std::memcpy(a, x, sizeof a);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] = a[i] + a[i + width];
  return a[0];
}

template <int N, class T>
void check_sums() {
  T x[N][16], out[16];
  Lanes<T, 16> lanes[N];
  for (int k = 0; k < N; ++k) {
    for (T& v : x[k]) v = number<T>();
    lanes[k] = Lanes<T, 16>::load(x[k]);
  }
  sum_each<N>(lanes, out);
  for (int k = 0; k < 16; ++k) expect(same(out[k], k < N ? folded(x[k]) : T(0)), "sum_each");
  for (int k = 0; k < N; ++k) expect(same(sum(lanes[k]), folded(x[k])), "sum");
}

template <class T>
void check_numbers() {
  using F = Lanes<T, 16>;
  T a[16], b[16], out[16];
  for (int i = 0; i < 16; ++i) a[i] = number<T>(), b[i] = number<T>();
  const F x = F::load(a), y = F::load(b);
  const auto less = x < y;
  uint32_t expected = 0;
  for (int i = 0; i < 16; ++i) expected |= uint32_t(a[i] < b[i]) << i;
  expect(less.bits() == expected, "operator<");
  select(less, x, y).store(out);
  for (int i = 0; i < 16; ++i) expect(same(out[i], a[i] < b[i] ? a[i] : b[i]), "select");
  select_or_zero(less, x).store(out);
  for (int i = 0; i < 16; ++i) expect(same(out[i], a[i] < b[i] ? a[i] : T(0)), "select_or_zero");
  min_(x, y).store(out);
  for (int i = 0; i < 16; ++i) expect(same(out[i], a[i] < b[i] ? a[i] : b[i]), "min_");
  max_(x, y).store(out);
  for (int i = 0; i < 16; ++i) expect(same(out[i], a[i] > b[i] ? a[i] : b[i]), "max_");

  const int count = int(bits() % 17);
  T memory[48];
  for (T& v : memory) v = number<T>();
  load_first(memory + 8, count).store(out);
  for (int i = 0; i < 16; ++i) expect(same(out[i], i < count ? memory[8 + i] : T(0)), "load_first");
  T before[48];
  std::memcpy(before, memory, sizeof before);
  store_first(x, memory + 8, count);
  for (int i = 0; i < 48; ++i) {
    const bool written = i >= 8 && i < 8 + count;
    expect(same(memory[i], written ? a[i - 8] : before[i]), "store_first");
  }

  int32_t index[16];
  for (int32_t& i : index) i = int32_t(bits() % 48);
  gather<T, 16>(before, index).store(out);
  for (int i = 0; i < 16; ++i) expect(same(out[i], before[index[i]]), "gather");

  uint8_t bytes[16];
  for (uint8_t& v : bytes) v = uint8_t(bits());
  load_bytes<T>(bytes).store(out);
  for (int i = 0; i < 16; ++i) expect(out[i] == T(bytes[i]), "load_bytes");

  F m[16];
  T rows[16][16], columns[16];
  for (int i = 0; i < 16; ++i) {
    for (T& v : rows[i]) v = number<T>();
    m[i] = F::load(rows[i]);
  }
  transpose_16(m);
  for (int j = 0; j < 16; ++j) {
    m[j].store(columns);
    for (int i = 0; i < 16; ++i) expect(same(columns[i], rows[i][j]), "transpose_16");
  }
}

void check_compress() {
  uint16_t masks[16];
  for (uint16_t& m : masks) m = uint16_t(bits() & bits());
  const uint32_t bit = 1u << (bits() % 16);
  const int32_t base = int32_t(bits() % 1000);
  int32_t out[32], count = 0;
  const int found = compress_16(masks, bit, base, out);
  for (int i = 0; i < 16; ++i) {
    if ((masks[i] & bit) == 0) continue;
    expect(count < found && out[count] == base + i, "compress_16");
    ++count;
  }
  expect(count == found, "compress_16");
}

}  // namespace

int main() {
  for (int round = 0; round < 2000; ++round) {
    check_numbers<float>();
    check_numbers<double>();
    check_sums<9, float>();
    check_sums<12, float>();
    check_sums<16, float>();
    check_sums<9, double>();
    check_compress();
  }
  return failures != 0;
}
