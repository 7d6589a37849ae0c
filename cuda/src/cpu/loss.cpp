// L1 + SSIM and its gradient, channels interleaved as they lie in an image. docs/math.md 7.
// Images of a stack lie one below the other, and each has strips of its own.
//
// Rows run through a ring of filtered rows, strip by strip, so that they stay in the first-level cache. The first sweep
// filters x, y, (x + y)^2 and (x - y)^2, which hold all that SSIM asks of x^2, y^2 and xy, and gives three derivative
// maps; the second filters these. A job makes both sweeps over a few strips side by side, with the maps of what its
// second sweep sees, so that they stay in the second-level cache: a quarter of the maps is computed twice in jobs of
// five strips, a half in jobs of one.
#include <algorithm>
#include <vector>

#include "../../math/ssim.h"
#include "lanes.h"
#include "pool.h"
#include "stages.h"

namespace splat {
namespace {

constexpr int kTaps = 2 * kSsimRadius + 1;
constexpr int kRowsAtOnce = 2;  // of the filter along y: neighbours share ten of their eleven rows
constexpr int kRingRows = kTaps + kRowsAtOnce - 1;
constexpr int kStripWidth = 96;  // numbers; a multiple of the lanes
constexpr int kStripRows = 64;
constexpr int kMoments = 4;
constexpr int kMaps = 3;  // derivatives by the filtered x, x^2 and xy

constexpr int kStripsPerJob = 5;

// An image is cut into strips, which have a sum each; a job has a few of a row of strips.
struct Strips {
  int width, height;  // numbers a row, rows of an image
  int across, down, images, per_job;
  Strips(const SplatLoss& loss, int threads)
      : width(loss.channels * loss.width), height(loss.height), across((width + kStripWidth - 1) / kStripWidth),
        down((height + kStripRows - 1) / kStripRows), images(loss.images), per_job(std::min(kStripsPerJob, across)) {
    while (per_job > 1 && jobs() < 4 * threads) --per_job;
  }
  int64_t count() const { return int64_t(across) * down * images; }
  int jobs_across() const { return (across + per_job - 1) / per_job; }
  int64_t jobs() const { return int64_t(jobs_across()) * down * images; }
};

// The strips of a job: columns [c0, c1) and rows [y0, y1) of an image.
struct Job {
  int64_t image_row;  // the stack's row where its image begins
  int64_t first_strip;
  int y0, y1, c0, c1;
  Job(const Strips& s, int64_t job)
      : image_row(job / (int64_t(s.jobs_across()) * s.down) * s.height),
        first_strip(job / s.jobs_across() * s.across + job % s.jobs_across() * s.per_job),
        y0(int(job / s.jobs_across() % s.down) * kStripRows), y1(std::min(s.height, y0 + kStripRows)),
        c0(int(job % s.jobs_across()) * s.per_job * kStripWidth),
        c1(std::min(s.width, c0 + s.per_job * kStripWidth)) {}
};

// Rows [y0, y1) that a sweep over a strip gives, from column c0 on.
struct Strip {
  int y0, y1, c0;
  // The filter along y takes kRowsAtOnce rows when the last row that it needs is there: row `last`.
  bool rows_end_at(int last) const {
    const int y = last - kSsimRadius;
    return y >= y0 && ((y - y0 + 1) % kRowsAtOnce == 0 || y + 1 == y1);
  }
  int rows_until(int last) const { return (last - kSsimRadius - y0) % kRowsAtOnce + 1; }
  int first_row(int last) const { return last - kSsimRadius - rows_until(last) + 1; }
};

double numbers_within(const SplatLoss& loss, int border) {
  return splat::numbers_within(loss.width, loss.height, loss.channels, loss.images, border);
}

// Numbers whose SSIM counts.
double numbers_of_ssim(const SplatLoss& loss) {
  if (loss.mask == nullptr) return numbers_within(loss, loss.border);
  int64_t pixels = 0;
  for (int64_t row = 0; row < int64_t(loss.images) * loss.height; ++row) {
    const int64_t y = row % loss.height;
    if (y < loss.border || y >= loss.height - loss.border) continue;
    const uint8_t* mask = loss.mask + row * loss.width;
    pixels += std::count(mask + loss.border, mask + loss.width - loss.border, uint8_t(0));
  }
  return double(pixels) * loss.channels;
}

// Rows of `N` quantities, filtered along x, waiting to be filtered along y.
template <class Real, int N, int kChannels>
struct Ring {
  using F = Lanes<Real, kLanes>;
  static_assert(kChannels * kSsimRadius <= kLanes, "a filter sees at most sixteen numbers to either side");
  alignas(64) Real rows[kRingRows][N][kStripWidth];

  static int slot(int y) { return (y + kRingRows) % kRingRows; }
  void clear_row(int y) { std::fill(&rows[slot(y)][0][0], &rows[slot(y)][0][0] + N * kStripWidth, Real(0)); }
  // Filters quantity n along x into row y: `width` numbers, which `input` has after sixteen others.
  SPLAT_INLINE void filter_row(int y, int n, const Real* input, int width) {
    Neighbours<Real> at(input);
    for (int c = 0; c < width; c += kLanes) {
      at.advance();
      F sum = at.template shifted<0>() * F(ssim_tap(0));
      add_tap<1>(at, sum), add_tap<2>(at, sum), add_tap<3>(at, sum), add_tap<4>(at, sum), add_tap<5>(at, sum);
      sum.store(rows[slot(y)][n] + c);
    }
  }
  template <int k>
  static SPLAT_INLINE void add_tap(const Neighbours<Real>& at, F& sum) {
    sum += (at.template shifted<-kChannels * k>() + at.template shifted<kChannels * k>()) * F(ssim_tap(k));
  }
  // Where the rows around rows y and y + 1 lie, top to bottom.
  struct Window {
    const Real* rows[kRingRows];
  };
  SPLAT_INLINE Window window(int y) const {
    Window w;
    for (int k = 0; k < kRingRows; ++k) w.rows[k] = rows[slot(y - kSsimRadius + k)][0];
    return w;
  }
  // Quantity n filtered both ways, at sixteen numbers from column c on, of rows y and y + 1.
  static SPLAT_INLINE void filtered(const Window& w, int n, int c, F out[kRowsAtOnce]) {
    const int at = n * kStripWidth + c;
    F row[kRingRows];
    for (int k = 0; k < kRingRows; ++k) row[k] = F::load(w.rows[k] + at);
    for (int r = 0; r < kRowsAtOnce; ++r) {
      F sum = row[r + kSsimRadius] * F(ssim_tap(0));
      for (int k = 1; k <= kSsimRadius; ++k)
        sum += (row[r + kSsimRadius - k] + row[r + kSsimRadius + k]) * F(ssim_tap(k));
      out[r] = sum;
    }
  }
};

template <class Real, int kChannels>
struct LossSweeps {
  using F = Lanes<Real, kLanes>;
  static constexpr int kReach = kChannels * kSsimRadius;  // numbers to either side that a filter sees
  static constexpr int kInput = kStripWidth + 2 * kLanes;
  const SplatLoss& loss;
  const Strips strips;
  double* partials;  // [strips, 2] sums of |x - y| and of SSIM

  // The derivative maps of a job, rows [y0, y1), and sixteen numbers to either side of its columns; zero beyond the
  // image and where SSIM does not count.
  struct Maps {
    std::vector<Real>& numbers;
    int y0, y1, c0, stride;
    Maps(std::vector<Real>& buffer, const Job& job, int height)
        : numbers(buffer), y0(std::max(0, job.y0 - kSsimRadius)), y1(std::min(height, job.y1 + kSsimRadius)),
          c0(job.c0 - kLanes), stride((job.c1 - job.c0 + kStripWidth - 1) / kStripWidth * kStripWidth + 2 * kLanes) {
      numbers.resize(size_t(kMaps) * (y1 - y0) * stride);
    }
    Real* at(int map, int y, int c) const {
      return numbers.data() + (int64_t(map) * (y1 - y0) + y - y0) * stride + (c - c0);
    }
    void clear(int from, int columns) const {
      for (int m = 0; m < kMaps; ++m)
        for (int y = y0; y < y1; ++y) std::fill_n(at(m, y, from), columns, Real(0));
    }
  };

  // Sixteen numbers of the target from `i` on, all of them inside it.
  SPLAT_INLINE F target(int64_t i) const {
    return loss.target_is_u8 ? load_bytes<Real>(static_cast<const uint8_t*>(loss.target) + i) * F(1.0 / 255.0)
                             : F::load(static_cast<const Real*>(loss.target) + i);
  }
  F first_targets(int64_t i, int count) const {
    Real t[kLanes] = {};
    for (int k = 0; k < count; ++k) t[k] = target_number(i + k);
    return F::load(t);
  }
  Real target_number(int64_t i) const {
    return loss.target_is_u8 ? Real(static_cast<const uint8_t*>(loss.target)[i]) * Real(1.0 / 255.0)
                             : static_cast<const Real*>(loss.target)[i];
  }

  void operator()(int64_t index) const {
    const Job job(strips, index);
    if (loss.v_image == nullptr) {
      for (int c = job.c0; c < job.c1; c += kStripWidth) own_statistics<false>(job, c, nullptr);
      return;
    }
    static thread_local std::vector<Real> buffer;
    const Maps maps(buffer, job, strips.height);
    const int right = maps.c0 + maps.stride - kLanes;  // the column after the last strip
    if (job.c0 > 0) statistics<true>({maps.y0, maps.y1, maps.c0}, kLanes, job, &maps);
    else maps.clear(maps.c0, kLanes);
    for (int c = job.c0; c < job.c1; c += kStripWidth) own_statistics<true>(job, c, &maps);
    if (right < strips.width) statistics<true>({maps.y0, maps.y1, right}, kLanes, job, &maps);
    else maps.clear(right, kLanes);
    for (int c = job.c0; c < job.c1; c += kStripWidth) gradient({job.y0, job.y1, c}, job, maps);
  }

  // Those of a strip of the job, whose sums it stores.
  template <bool kGradient>
  void own_statistics(const Job& job, int c0, const Maps* maps) const {
    const Strip strip = kGradient ? Strip{maps->y0, maps->y1, c0} : Strip{job.y0, job.y1, c0};
    const Sums sums = statistics<kGradient>(strip, kStripWidth, job, maps);
    double* out = partials + 2 * (job.first_strip + (c0 - job.c0) / kStripWidth);
    out[0] = sums.l1, out[1] = sums.ssim;
  }

  // Of the rows of the job.
  struct Sums {
    double l1 = 0, ssim = 0;
  };

  // Statistics of the `width` columns of a strip, and its derivative maps.
  template <bool kGradient>
  Sums statistics(const Strip& strip, int width, const Job& job, const Maps* maps) const {
    alignas(64) Real input[kMoments][kInput] = {};
    Ring<Real, kMoments, kChannels> ring = {};
    Sums sums;
    for (int y = strip.y0 - kSsimRadius; y < strip.y1 + kSsimRadius; ++y) {
      if (y < 0 || y >= strips.height) {
        ring.clear_row(y);
      } else {
        load_images(input, strip.c0, width, job.image_row + y);
        if (y >= job.y0 && y < job.y1) sums.l1 += l1_row(input, std::min(width, strips.width - strip.c0));
        for (int n = 0; n < kMoments; ++n) ring.filter_row(y, n, input[n], width);
      }
      if (strip.rows_end_at(y)) ssim_rows<kGradient>(ring, strip, width, y, job, maps, sums);
    }
    return sums;
  }

  // The images' columns c0 to c0 + width of a row of the stack, after sixteen others; beyond what the filter sees and
  // beyond the image numbers stay as they are, zero.
  void load_images(Real (&input)[kMoments][kInput], int c0, int width, int64_t stack_row) const {
    const Real* row = static_cast<const Real*>(loss.image) + stack_row * strips.width;
    const int64_t offset = stack_row * strips.width;
    const int begin = std::max(0, c0 - kReach), end = std::min(strips.width, c0 + width + kReach);
    const int first = c0 - kLanes;
    int c = begin;
    for (; c + kLanes <= end; c += kLanes) {
      F::load(row + c).store(input[0] + (c - first));
      target(offset + c).store(input[1] + (c - first));
    }
    for (; c < end; ++c) input[0][c - first] = row[c], input[1][c - first] = target_number(offset + c);
    for (int i = 0; i < width + 2 * kLanes; i += kLanes) {
      const F a = F::load(input[0] + i), b = F::load(input[1] + i);
      square(a + b).store(input[2] + i);
      square(a - b).store(input[3] + i);
    }
  }

  double l1_row(const Real (&input)[kMoments][kInput], int inside) const {
    F total = F(0);
    Real rest = 0;
    int c = kLanes;
    for (; c + kLanes <= kLanes + inside; c += kLanes) total += abs_(F::load(input[0] + c) - F::load(input[1] + c));
    for (; c < kLanes + inside; ++c) rest += splat::abs_(input[0][c] - input[1][c]);
    return double(sum(total)) + double(rest);
  }

  // The rows whose windows end in row `last`, one after the other.
  template <bool kGradient>
  void ssim_rows(const Ring<Real, kMoments, kChannels>& ring, const Strip& strip, int width, int last, const Job& job,
                 const Maps* maps, Sums& sums) const {
    const int y0 = strip.first_row(last), count = strip.rows_until(last);
    const auto window = ring.window(y0);
    const int c0 = strip.c0;
    // Columns of the strip whose windows count; elsewhere the maps are 0.
    const int border = loss.border * kChannels;
    const int inside = std::min(width, strips.width - c0);
    const int first = std::min(std::max(0, border - c0), inside);
    const int limit = std::max(first, std::min(inside, strips.width - border - c0));
    const auto counts = [&](int r) {
      return r < count && y0 + r >= loss.border && y0 + r < strips.height - loss.border;
    };
    F total[kRowsAtOnce];
    double rest[kRowsAtOnce] = {};
    for (F& t : total) t = F(0);
    for (int c = first / kLanes * kLanes; c < limit; c += kLanes) {
      F f[kMoments][kRowsAtOnce];
      for (int n = 0; n < kMoments; ++n) ring.filtered(window, n, c, f[n]);
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (!counts(r)) continue;
        F derivative[kMaps];
        const F squares = (f[2][r] + f[3][r]) * F(0.5), xy = (f[2][r] - f[3][r]) * F(0.25);
        const F ssim = ssim_pixel_vjp(f[0][r], f[1][r], squares, xy, &derivative[0], &derivative[1], &derivative[2]);
        if constexpr (kGradient)
          for (int m = 0; m < kMaps; ++m) derivative[m].store(maps->at(m, y0 + r, c0 + c));
        if (loss.mask == nullptr && c >= first && c + kLanes <= limit) {
          total[r] += ssim;
          continue;
        }
        const uint8_t* mask = loss.mask == nullptr ? nullptr : loss.mask + (job.image_row + y0 + r) * loss.width;
        Real lanes[kLanes];
        ssim.store(lanes);
        for (int k = std::max(0, first - c); k < std::min(kLanes, limit - c); ++k)
          if (mask == nullptr || mask[(c0 + c + k) / kChannels] == 0) rest[r] += double(lanes[k]);
      }
    }
    for (int r = 0; r < count; ++r) {
      const int y = y0 + r;
      for (int m = 0; kGradient && m < kMaps; ++m) {
        Real* map = maps->at(m, y, c0);
        std::fill(map, map + (counts(r) ? first : width), Real(0));
        std::fill(map + limit, map + width, Real(0));
      }
      if (y >= job.y0 && y < job.y1) sums.ssim += double(sum(total[r])) + rest[r];
    }
  }

  void gradient(const Strip& strip, const Job& job, const Maps& maps) const {
    Ring<Real, kMaps, kChannels> ring = {};
    for (int y = strip.y0 - kSsimRadius; y < strip.y1 + kSsimRadius; ++y) {
      if (y < 0 || y >= strips.height) {
        ring.clear_row(y);
      } else {
        for (int m = 0; m < kMaps; ++m) ring.filter_row(y, m, maps.at(m, y, strip.c0 - kLanes), kStripWidth);
      }
      if (strip.rows_end_at(y)) gradient_rows(ring, strip, y, job);
    }
  }

  void gradient_rows(const Ring<Real, kMaps, kChannels>& ring, const Strip& strip, int last, const Job& job) const {
    const int y = strip.first_row(last), count = strip.rows_until(last);
    const auto window = ring.window(y);
    const F l1_scale = F((1.0 - loss.ssim_lambda) / numbers_within(loss, 0));
    const F ssim_scale = F(-loss.ssim_lambda / numbers_within(loss, loss.border));
    const int64_t offset = (job.image_row + y) * strips.width + strip.c0;
    const int inside = std::min(kStripWidth, strips.width - strip.c0);
    const Real* image = static_cast<const Real*>(loss.image) + offset;
    Real* v_image = static_cast<Real*>(loss.v_image) + offset;
    for (int c = 0; c < inside; c += kLanes) {
      F f[kMaps][kRowsAtOnce];
      for (int m = 0; m < kMaps; ++m) ring.filtered(window, m, c, f[m]);
      const int numbers = std::min(kLanes, inside - c);
      for (int r = 0; r < count; ++r) {
        const int64_t at = int64_t(r) * strips.width + c;
        const bool all = numbers == kLanes;
        const F x = all ? F::load(image + at) : load_first(image + at, numbers);
        const F t = all ? target(offset + at) : first_targets(offset + at, numbers);
        const F ssim = f[0][r] + F(2) * x * f[1][r] + t * f[2][r];
        const F sign = select(x > t, F(1), select(x < t, F(-1), F(0)));
        const F v = sign * l1_scale + ssim * ssim_scale;
        all ? v.store(v_image + at) : store_first(v, v_image + at, numbers);
      }
    }
  }
};

}  // namespace

template <class Real>
int64_t Stages<Real>::loss_bytes(const SplatLoss& loss) {
  return 2 * Strips(loss, 1).count() * int64_t(sizeof(double));
}

template <class Real>
void Stages<Real>::loss(const SplatCall& call, SplatLoss& loss) {
  const Strips strips(loss, call.threads);
  double* partials = static_cast<double*>(loss.workspace);
  const auto run = [&](const auto& sweeps) { parallel_for(call.threads, strips.jobs(), sweeps); };
  if (loss.channels == 1) run(LossSweeps<Real, 1>{loss, strips, partials});
  else run(LossSweeps<Real, 3>{loss, strips, partials});
  loss.l1 = loss.ssim = 0;
  for (int64_t strip = 0; strip < strips.count(); ++strip)
    loss.l1 += partials[2 * strip], loss.ssim += partials[2 * strip + 1];
  loss.l1 /= numbers_within(loss, 0), loss.ssim /= numbers_of_ssim(loss);
}

#define SPLAT_INSTANTIATE(Real)                                    \
  template int64_t Stages<Real>::loss_bytes(const SplatLoss&);     \
  template void Stages<Real>::loss(const SplatCall&, SplatLoss&);
SPLAT_INSTANTIATE(float)
#ifdef SPLAT_WITH_DOUBLE
SPLAT_INSTANTIATE(double)
#endif

}  // namespace splat
