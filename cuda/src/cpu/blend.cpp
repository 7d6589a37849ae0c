// Blending, forward and backward, one 16x16 tile a job; the lanes are the pixels of a 4x4 block. docs/math.md 6.
#include "stages.h"
#include "tile.h"

namespace splat {
namespace {

// ---- forward -----------------------------------------------------------------------------------------------------

template <class Real, bool Depth>
struct TileBlender {
  using F = Lanes<Real, kLanes>;
  const SplatView& view;
  const SplatFrame& frame;
  const Real* background;
  const SplatImages& out;

  struct Buffers {
    alignas(64) Real transmittance[kPixels], red[kPixels], green[kPixels], blue[kPixels], depth[kPixels];
  };

  void operator()(int64_t index) const {
    const Tile<Real> tile(view, frame, index);
    Buffers buffers;
    tile.initial_transmittance(buffers.transmittance);
    int64_t end = tile.begin;
    for (int b = 0; b < kBlocksPerTile; ++b) end = std::max(end, blend_block(tile, b, buffers));
    frame.tile_ends[index] = int32_t(end - tile.begin);
    write(tile, buffers);
  }

  // The pixels of a block. A pixel is alive until its transmittance would fall to kMinTransmittance; `decaying` is 0 in
  // the lanes that are not, and `transmittance` is what they had before.
  struct Pixels {
    F x, y, decaying, transmittance;
    F red = 0, green = 0, blue = 0, depth = 0;
    uint32_t alive;

    // Blends the next N projected Gaussians; returns how many until no pixel was alive, N if some still are. Unless a
    // pixel ends among them, nothing is masked.
    template <int N>
    SPLAT_INLINE int add(const Real* const* proj) {
      F weights[N];
      F after = decaying;
      for (int k = 0; k < N; ++k) {
        weights[k] = block_alpha(proj[k], x - F(proj[k][kProjX]), y - F(proj[k][kProjY])) * after;
        after -= weights[k];
      }
      const auto live = after > F(kMinTransmittance);
      if (__builtin_expect(live.bits() != alive, false)) return add_masked<N>(proj, weights);
      decaying = after;
      transmittance = select(live, after, transmittance);
      for (int k = 0; k < N; ++k) add_colour(proj[k], weights[k]);
      return N;
    }

    template <int N>
    SPLAT_INLINE int add_masked(const Real* const* proj, const F* weights) {
      for (int k = 0; k < N; ++k) {
        const F weight = select_or_zero(decaying > F(0), weights[k]), after = decaying - weight;
        const auto live = after > F(kMinTransmittance);
        decaying = select_or_zero(live, after);
        transmittance = select(live, after, transmittance);
        add_colour(proj[k], select_or_zero(live, weight));
        alive = live.bits();
        if (alive == 0) return k + 1;
      }
      return N;
    }

    SPLAT_INLINE void add_colour(const Real* proj, F weight) {
      red += weight * F(proj[kProjRed]);
      green += weight * F(proj[kProjGreen]);
      blue += weight * F(proj[kProjBlue]);
      if constexpr (Depth) depth += weight * F(proj[kProjDepth]);
    }
  };

  // Blends the block's own list; returns the intersection after the last one that any pixel evaluated.
  int64_t blend_block(const Tile<Real>& tile, int block, Buffers& buffers) const {
    const F initial = F::load(buffers.transmittance + block * kLanes);
    Pixels pixels{Tile<Real>::lane_x() + F(Real(tile.x0 + kBlock * (block % kBlock))),
                  Tile<Real>::lane_y() + F(Real(tile.y0 + kBlock * (block / kBlock))), initial, initial};
    pixels.alive = (initial > F(0)).bits();
    const int64_t end = blend_list(tile, block, pixels);
    pixels.transmittance.store(buffers.transmittance + block * kLanes);
    pixels.red.store(buffers.red + block * kLanes);
    pixels.green.store(buffers.green + block * kLanes);
    pixels.blue.store(buffers.blue + block * kLanes);
    if constexpr (Depth) pixels.depth.store(buffers.depth + block * kLanes);
    return end;
  }

  SPLAT_INLINE int64_t blend_list(const Tile<Real>& tile, int block, Pixels& pixels) const {
    constexpr int kBatch = 256, kGroup = 4;
    const Real* projected = static_cast<const Real*>(frame.projected);
    int32_t list[kBatch + kLanes];
    if (pixels.alive == 0) return tile.begin;  // outside the image
    for (int64_t base = tile.begin; base < tile.end; base += kBatch) {
      const int count = list_block(frame, base, std::min<int64_t>(kBatch, tile.end - base), 1u << block, list);
      const auto at = [&](int i) { return projected + int64_t(frame.isect_gaussians[base + list[i]]) * kProjectedSize; };
      int i = 0;
      for (; i + kGroup <= count; i += kGroup) {
        for (int k = i + kGroup; k < std::min(count, i + 2 * kGroup); ++k) __builtin_prefetch(at(k));
        const Real* const proj[kGroup] = {at(i), at(i + 1), at(i + 2), at(i + 3)};
        const int blended = pixels.template add<kGroup>(proj);
        if (pixels.alive == 0) return base + list[i + blended - 1] + 1;
      }
      for (; i < count; ++i) {
        const Real* const proj[1] = {at(i)};
        pixels.template add<1>(proj);
        if (pixels.alive == 0) return base + list[i] + 1;
      }
    }
    return tile.end;
  }

  // Row by row through small arrays, which the compiler turns into vectors.
  void write(const Tile<Real>& tile, const Buffers& buffers) const {
    const Real bg[3] = {background[0], background[1], background[2]};
    for (int y = 0; y < tile.height; ++y) {
      Real red[kTile], green[kTile], blue[kTile], t[kTile], pixels[3 * kTile], alpha[kTile];
      tile.row_from_lanes(buffers.red, y, red);
      tile.row_from_lanes(buffers.green, y, green);
      tile.row_from_lanes(buffers.blue, y, blue);
      tile.row_from_lanes(buffers.transmittance, y, t);
      for (int x = 0; x < kTile; ++x) {
        pixels[3 * x] = red[x] + t[x] * bg[0];
        pixels[3 * x + 1] = green[x] + t[x] * bg[1];
        pixels[3 * x + 2] = blue[x] + t[x] * bg[2];
        alpha[x] = Real(1) - t[x];
      }
      const int64_t row = int64_t(tile.y0 + y) * view.width + tile.x0;
      copy_row<3>(pixels, tile.width, static_cast<Real*>(out.image) + 3 * row);
      copy_row<1>(alpha, tile.width, static_cast<Real*>(out.alpha) + row);
      if constexpr (Depth) {
        tile.row_from_lanes(buffers.depth, y, t);
        copy_row<1>(t, tile.width, static_cast<Real*>(out.depth) + row);
      }
    }
  }
};

// ---- backward ----------------------------------------------------------------------------------------------------

// Front to back again, with the same arithmetic, so that nothing but the images is kept from the forward pass.
// Intersections are the outer loop here, blocks the inner one: the sums of one stay in registers and are reduced once.
// Abs: sums for density control too.
template <class Real, bool Depth, bool Abs>
struct TileBlenderVjp {
  using F = Lanes<Real, kLanes>;
  // Where registers do not hold all sums of an intersection, some get loops of their own.
  static constexpr bool kSumsInRegisters = SPLAT_VECTOR_BYTES == 64;
  const SplatView& view;
  const SplatFrame& frame;
  const Real* background;
  const SplatImages& out;
  const SplatImages& v_out;
  Real* background_partials;  // or null

  // What a visit of a block reads lies together. The padding keeps numbers that are stored from sharing their last
  // twelve address bits with those that are loaded soon after: processors take them for the same.
  struct Buffers {
    struct Block {
      Real x[kLanes], y[kLanes], transmittance[kLanes], behind[kLanes];
      Real red[kLanes], green[kLanes], blue[kLanes], depth[kLanes], padding[kLanes];
    };
    alignas(64) Block blocks[kBlocksPerTile];
  };
  using Field = Real (Buffers::Block::*)[kLanes];

  void operator()(int64_t index) const {
    const Tile<Real> tile(view, frame, index);
    Buffers buffers;
    read(tile, buffers, index);
    const Real* projected = static_cast<const Real*>(frame.projected);
    Real* isect_grads = static_cast<Real*>(frame.isect_grads);
    const int64_t stop = tile.begin + frame.tile_ends[index];
    uint32_t alive = (1u << kBlocksPerTile) - 1u;
    for (int64_t p = tile.begin; p < tile.end; ++p) {
      Real* grad = isect_grads + int64_t(frame.isect_grad_rows[p]) * kIsectGradSize;
      if (p + kAhead < stop)
        __builtin_prefetch(projected + int64_t(frame.isect_gaussians[p + kAhead]) * kProjectedSize);
      if (p + kAheadStored < tile.end)
        __builtin_prefetch(isect_grads + int64_t(frame.isect_grad_rows[p + kAheadStored]) * kIsectGradSize, 1);
      const uint32_t mask = p < stop ? frame.isect_masks[p] & alive : 0u;
      if (mask == 0) {
        std::fill(grad, grad + kIsectGradSize, Real(0));
        continue;
      }
      isect_grad(projected + int64_t(frame.isect_gaussians[p]) * kProjectedSize, mask, alive, buffers, grad);
    }
  }

  // What the loops over the blocks of an intersection hand on.
  struct Visit {
    Real dx[kLanes], dy[kLanes], alpha[kLanes], v[kLanes], weight[kLanes];
  };

  SPLAT_INLINE void isect_grad(const Real* proj, uint32_t mask, uint32_t& alive, Buffers& buffers, Real* grad) const {
    using Block = typename Buffers::Block;
    const F mean_x = proj[kProjX], mean_y = proj[kProjY];
    const F red = proj[kProjRed], green = proj[kProjGreen], blue = proj[kProjBlue], depth = proj[kProjDepth];
    F sums[kIsectGradUsed];
    for (F& sum : sums) sum = F(0);
    const auto add_moments = [&](F v, F dx, F dy) {
      const F vx = v * dx, vy = v * dy;
      sums[kGradV] += v;
      sums[kGradVx] += vx;
      sums[kGradVy] += vy;
      sums[kGradVxx] += vx * dx;
      sums[kGradVxy] += vx * dy;
      sums[kGradVyy] += vy * dy;
    };
    const auto add_abs = [&](F v, F dx, F dy) {
      F abs_x, abs_y;
      abs_mean2d_grads(proj, v * dx, v * dy, abs_x, abs_y);
      sums[kGradAbsX] += abs_x;
      sums[kGradAbsY] += abs_y;
    };
    const auto add_colours = [&](F w, const Block& at) {
      sums[kGradRed] += w * F::load(at.red);
      sums[kGradGreen] += w * F::load(at.green);
      sums[kGradBlue] += w * F::load(at.blue);
      if constexpr (Depth) sums[kGradDepth] += w * F::load(at.depth);
    };
    alignas(64) Visit visits[kBlocksPerTile];
    const auto each_block = [&](const auto& job) {
      Visit* visit = visits;
      for (uint32_t left = mask; left != 0; left &= left - 1) job(__builtin_ctz(left), *visit++);
    };

    // The alphas of all blocks come first: loops of short chains of dependent operations, of which the processor has
    // more in flight than of one long one.
    each_block([&](int block, Visit& visit) {
      const Block& at = buffers.blocks[block];
      const F dx = F::load(at.x) - mean_x, dy = F::load(at.y) - mean_y;
      unclamped_alpha(proj, dx, dy).store(visit.alpha);
      if constexpr (!kSumsInRegisters) dx.store(visit.dx), dy.store(visit.dy);
    });
    each_block([&](int block, Visit& visit) {
      Block& at = buffers.blocks[block];
      const F raw = F::load(visit.alpha), alpha = min_(F(kMaxAlpha), raw);
      const F before = F::load(at.transmittance);
      const F after = before - alpha * before;
      const auto live = after > F(kMinTransmittance);
      after.store(at.transmittance);
      const F live_alpha = select_or_zero(live, alpha);
      const F w = live_alpha * before;
      F cg = red * F::load(at.red) + green * F::load(at.green) + blue * F::load(at.blue);
      if constexpr (Depth) cg += depth * F::load(at.depth);
      const F behind = F::load(at.behind) - w * cg;
      behind.store(at.behind);
      // No gradient reaches geometry or opacity where alpha was clamped.
      const F free_alpha = select_or_zero(raw <= F(kMaxAlpha), live_alpha);
      const F v = free_alpha * alpha_vjp(before, cg, behind, F(1) - alpha);
      if constexpr (kSumsInRegisters) {
        const F dx = F::load(at.x) - mean_x, dy = F::load(at.y) - mean_y;
        add_moments(v, dx, dy), add_colours(w, at);
        if constexpr (Abs) add_abs(v, dx, dy);
      } else {
        v.store(visit.v), w.store(visit.weight);
      }
      if (!any(live)) alive &= ~(1u << block);
    });
    if constexpr (!kSumsInRegisters) {
      const auto each_moment = [&](const auto& add) {
        each_block([&](int, Visit& visit) { add(F::load(visit.v), F::load(visit.dx), F::load(visit.dy)); });
      };
      each_moment(add_moments);
      each_block([&](int block, Visit& visit) { add_colours(F::load(visit.weight), buffers.blocks[block]); });
      if constexpr (Abs) each_moment(add_abs);
    }
    sum_each<isect_grad_fields(Depth, Abs)>(sums, grad);
  }

  // Gradients of the images, lane by lane, and their product with everything that was blended.
  void read(const Tile<Real>& tile, Buffers& buffers, int64_t index) const {
    const F lane_x = Tile<Real>::lane_x(), lane_y = Tile<Real>::lane_y();
    for (int b = 0; b < kBlocksPerTile; ++b) {
      (lane_x + F(Real(tile.x0 + kBlock * (b % kBlock)))).store(buffers.blocks[b].x);
      (lane_y + F(Real(tile.y0 + kBlock * (b / kBlock)))).store(buffers.blocks[b].y);
    }
    alignas(64) Real transmittance[kPixels];
    tile.initial_transmittance(transmittance);
    for (int b = 0; b < kBlocksPerTile; ++b)
      std::copy_n(transmittance + b * kLanes, kLanes, buffers.blocks[b].transmittance);
    Real v_background[3] = {0, 0, 0};
    for (int y = 0; y < kTile; ++y) read_row(tile, y, buffers, v_background);
    if (background_partials != nullptr) std::copy(v_background, v_background + 3, background_partials + 3 * index);
  }

  // The sixteen pixels of a row lie in four blocks, four lanes in each.
  static SPLAT_INLINE void store_row(const Real* row, int y, Field field, Buffers& buffers) {
    for (int b = 0; b < kTile / kBlock; ++b)
      std::copy_n(row + b * kBlock, kBlock,
                  buffers.blocks[(y / kBlock) * (kTile / kBlock) + b].*field + (y % kBlock) * kBlock);
  }

  // One row; pixels outside the image have no gradient.
  SPLAT_INLINE void read_row(const Tile<Real>& tile, int y, Buffers& buffers, Real* v_background) const {
    const size_t width = y < tile.height ? size_t(tile.width) : 0;
    const int64_t row = int64_t(tile.y0 + y) * view.width + tile.x0;
    Real pixels[3 * kTile] = {}, grads[3 * kTile] = {}, alpha[kTile] = {}, v_alpha[kTile] = {};
    copy_row<3>(static_cast<const Real*>(out.image) + 3 * row, width, pixels);
    copy_row<3>(static_cast<const Real*>(v_out.image) + 3 * row, width, grads);
    copy_row<1>(static_cast<const Real*>(out.alpha) + row, width, alpha);
    if (v_out.alpha != nullptr) copy_row<1>(static_cast<const Real*>(v_out.alpha) + row, width, v_alpha);
    Real red[kTile], green[kTile], blue[kTile], behind[kTile];
    for (int x = 0; x < kTile; ++x) {
      red[x] = grads[3 * x], green[x] = grads[3 * x + 1], blue[x] = grads[3 * x + 2];
      behind[x] = pixels[3 * x] * red[x] + pixels[3 * x + 1] * green[x] + pixels[3 * x + 2] * blue[x] -
                  (Real(1) - alpha[x]) * v_alpha[x];
    }
    if constexpr (Depth) {
      Real depth[kTile] = {}, v_depth[kTile] = {};
      copy_row<1>(static_cast<const Real*>(out.depth) + row, width, depth);
      copy_row<1>(static_cast<const Real*>(v_out.depth) + row, width, v_depth);
      for (int x = 0; x < kTile; ++x) behind[x] += depth[x] * v_depth[x];
      store_row(v_depth, y, &Buffers::Block::depth, buffers);
    }
    store_row(red, y, &Buffers::Block::red, buffers);
    store_row(green, y, &Buffers::Block::green, buffers);
    store_row(blue, y, &Buffers::Block::blue, buffers);
    store_row(behind, y, &Buffers::Block::behind, buffers);
    if (background_partials == nullptr) return;
    for (size_t x = 0; x < width; ++x) {
      const Real t = Real(1) - alpha[x];
      v_background[0] += t * red[x], v_background[1] += t * green[x], v_background[2] += t * blue[x];
    }
  }
};

}  // namespace

template <class Real>
void Stages<Real>::blend(const SplatCall& call, const SplatView& view, const SplatFrame& frame, const void* background,
                         const SplatImages& out) {
  if (frame.channels != nullptr) return blend_channels(call, view, frame, background, out);
  const Real* bg = static_cast<const Real*>(background);
  if (view.with_depth) {
    for_tiles(call, view, TileBlender<Real, true>{view, frame, bg, out});
  } else {
    for_tiles(call, view, TileBlender<Real, false>{view, frame, bg, out});
  }
}

template <class Real>
void Stages<Real>::blend_vjp(const SplatCall& call, const SplatView& view, const SplatFrame& frame,
                             const void* background, const SplatImages& out, const SplatImages& v_out,
                             void* background_partials, void* v_background) {
  if (frame.channels != nullptr)
    return blend_channels_vjp(call, view, frame, out, v_out, background_partials, v_background);
  const Real* bg = static_cast<const Real*>(background);
  Real* partials = static_cast<Real*>(background_partials);
  const auto run = [&](auto depth, auto abs) {
    for_tiles(call, view, TileBlenderVjp<Real, depth(), abs()>{view, frame, bg, out, v_out, partials});
  };
  if (frame.with_abs) {
    v_out.depth != nullptr ? run(std::true_type(), std::true_type()) : run(std::false_type(), std::true_type());
  } else {
    v_out.depth != nullptr ? run(std::true_type(), std::false_type()) : run(std::false_type(), std::false_type());
  }
  if (v_background == nullptr) return;
  const int64_t tiles = tiles_of(view);
  Real sum[3] = {0, 0, 0};
  for (int64_t t = 0; t < tiles; ++t)
    for (int c = 0; c < 3; ++c) sum[c] += partials[3 * t + c];
  std::copy(sum, sum + 3, static_cast<Real*>(v_background));
}

#define SPLAT_INSTANTIATE(Real)                                                                                   \
  template void Stages<Real>::blend(const SplatCall&, const SplatView&, const SplatFrame&, const void*,           \
                                    const SplatImages&);                                                          \
  template void Stages<Real>::blend_vjp(const SplatCall&, const SplatView&, const SplatFrame&, const void*,       \
                                        const SplatImages&, const SplatImages&, void*, void*);
SPLAT_INSTANTIATE(float)
#ifdef SPLAT_WITH_DOUBLE
SPLAT_INSTANTIATE(double)
#endif

}  // namespace splat
