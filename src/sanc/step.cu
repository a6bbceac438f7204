// The decisions of a recorded step, and the passes over vectors around them, for a GPU.
//
// decide and conclude are sanc/decisions.py again, with sanc/cubic.py, judge.py and escape.py, in float64. decide is one
// warp: its lanes share out rows and entries (EACH), and what is left all of them compute. With HOST defined a C++
// compiler takes both for a plain machine, which is how they are tested where there is no GPU. sanc/kernels.py defines
// the names of entries (RULE_*, REPORT_*, NOTE_*, ...), the type `real` of the parameters, MOST, the dimension of the
// Krylov space, and SUM_BLOCKS, the blocks that share a sum.

#ifdef HOST
#include <math.h>
#define FUNCTION static
#define OUTSIDE static
#define KERNEL extern "C" void
#define SHARED
#define LANE 0
#define LANES 1
#define SYNC
#define ROLLED
#define EACH(i) for (int i = 0; i < n; ++i)
#define rsqrt(a) (1.0 / sqrt(a))
#else
#define FUNCTION __device__
#define OUTSIDE __device__ __noinline__
#define KERNEL extern "C" __global__ void
#define SHARED __shared__
#define LANE ((int)threadIdx.x)
#define LANES 32
#define SYNC __syncwarp()
#define ROLLED _Pragma("unroll 1")  // one warp runs through it once: it waits for instructions, not for jumps
#define EACH(i) _Pragma("unroll 1") for (int i = LANE; i < n; i += LANES)
#ifndef NAN
#define NAN __longlong_as_double(0x7ff8000000000000LL)
#endif
#endif

FUNCTION double larger(double a, double b) { return b > a ? b : a; }
FUNCTION double smaller(double a, double b) { return b < a ? b : a; }
FUNCTION bool finite_number(double a) { return fabs(a) <= 1.7976931348623157e308; }

OUTSIDE double length_of(int n, const double* y) {
  double most = 0.0, sum = 0.0;
  ROLLED for (int i = 0; i < n; ++i) most = larger(most, fabs(y[i]));
  if (most < 1e-290 || !finite_number(most)) return most;
  const double by = 1.0 / most;
  ROLLED for (int i = 0; i < n; ++i) sum += (y[i] * by) * (y[i] * by);
  return most * sqrt(sum);
}

// Eigenpairs of the symmetric tridiagonal matrix, ascending, by QL with implicit shifts. Column i of `vectors` (rows of
// MOST) belongs to values[i]; every lane keeps its own copy of values and `off`, and turns the rows that are its own.
// The largest entry of the first column is positive. The matrix is scaled to entries of at most 1 meanwhile.
FUNCTION void spectrum(int n, const double* alpha, const double* beta, double* values, double* off, double* vectors) {
  double size = 0.0;
  ROLLED for (int i = 0; i < n; ++i) size = larger(size, larger(fabs(alpha[i]), i + 1 < n ? beta[i] : 0.0));
  const double by = size > 1e-290 ? 1.0 / size : 1.0, back = size > 1e-290 ? size : 1.0;
  ROLLED for (int i = 0; i < n; ++i) {
    values[i] = by * alpha[i];
    off[i] = i + 1 < n ? by * beta[i] : 0.0;
  }
  ROLLED for (int row = LANE; row < n; row += LANES)
    ROLLED for (int i = 0; i < n; ++i) vectors[row * MOST + i] = row == i;
  ROLLED for (int top = 0; top < n; ++top) {
    for (int turn = 0; turn < 60; ++turn) {
      int end = top;  // the block from `top` to `end` has no zero beside its diagonal
      while (end + 1 < n && fabs(off[end]) > 1.1102230246251565e-16 * (fabs(values[end]) + fabs(values[end + 1]))) ++end;
      if (end == top) break;
      double half = 0.5 * (values[top + 1] - values[top]), e = off[top];
      double reach = half + copysign(sqrt(half * half + e * e), half), shift = reach != 0.0 ? e * e / reach : 0.0;
      double g = values[end] - values[top] + shift, s = 1.0, c = 1.0, moved = 0.0;
      int i = end - 1;
      for (; i >= top; --i) {
        double f = s * off[i], b = c * off[i], square = f * f + g * g;
        if (square < 1e-290) {  // the block falls apart here
          off[i + 1] = off[end] = 0.0;
          values[i + 1] -= moved;
          break;
        }
        double inverse = rsqrt(square), r = square * inverse;
        off[i + 1] = r;
        s = f * inverse;
        c = g * inverse;
        g = values[i + 1] - moved;
        r = (values[i] - g) * s + 2.0 * c * b;
        moved = s * r;
        values[i + 1] = g + moved;
        g = c * r - b;
        ROLLED for (int row = LANE; row < n; row += LANES) {
          double* own = vectors + row * MOST + i;
          double right = own[1];
          own[1] = s * own[0] + c * right;
          own[0] = c * own[0] - s * right;
        }
      }
      if (i >= top) continue;
      values[top] -= moved;
      off[top] = g;
      off[end] = 0.0;
    }
  }
  ROLLED for (int i = 0; i + 1 < n; ++i) {
    int least = i;
    ROLLED for (int k = i + 1; k < n; ++k)
      if (values[k] < values[least]) least = k;
    if (least == i) continue;
    double value = values[i];
    values[i] = values[least];
    values[least] = value;
    ROLLED for (int row = LANE; row < n; row += LANES) {
      double* own = vectors + row * MOST;
      double entry = own[i];
      own[i] = own[least];
      own[least] = entry;
    }
  }
  ROLLED for (int i = 0; i < n; ++i) values[i] *= back;
  SYNC;
  int most = 0;
  ROLLED for (int row = 1; row < n; ++row)
    if (fabs(vectors[row * MOST]) > (1.0 + 1e-8) * fabs(vectors[most * MOST])) most = row;
  const bool turn = vectors[most * MOST] < 0.0;
  SYNC;
  ROLLED for (int row = LANE; turn && row < n; row += LANES) vectors[row * MOST] = -vectors[row * MOST];
  SYNC;
}

OUTSIDE double quadratic_root(double size, double gap, double base) {
  double excess = size - base * gap, total = base + gap;
  return excess <= 0.0 ? 0.0 : 2.0 * excess / (total + sqrt(total * total + 4.0 * excess));
}

// Scratch of the cubic model, shared by the lanes.
struct Work {
  double c[MOST], gaps[MOST], y[MOST], inverse[MOST];
};

// Solve |y(t)| = base + t for t >= 0 with y(t) = -c / (gaps + t), the hard case included; `size` is |c|. The entries are
// shared out among the lanes, and every lane adds all of them up.
FUNCTION double secular(int n, Work& w, double size, double base, double sign) {
  EACH(i) w.inverse[i] = quadratic_root(fabs(w.c[i]), w.gaps[i], base);
  SYNC;
  double lower = 0.0;
  ROLLED for (int i = 0; i < n; ++i) lower = larger(lower, w.inverse[i]);
  if (lower == 0.0) {
    SYNC;
    EACH(i) w.y[i] = w.c[i] != 0.0 ? -w.c[i] / w.gaps[i] : 0.0;
    SYNC;
    const double rest = length_of(n, w.y);
    if (base == 0.0 && rest == 0.0) return 0.0;
    if (rest <= base) {
      SYNC;
      if (LANE == 0) w.y[0] = sign * sqrt((base - rest) * (base + rest));
      SYNC;
      return 0.0;
    }
  }
  double upper = quadratic_root(size, w.gaps[0], base) * (1.0 + 1e-12);
  upper = larger(larger(upper, lower), 4.9406564584124654e-324);
  double t = lower > 0.0 ? lower : 0.5 * upper;
  const double up = size < 1e-140 ? 1e150 : 1.0;  // squares of y are never 0
  for (int turn = 0; turn < 200; ++turn) {
    SYNC;
    EACH(i) {
      w.inverse[i] = 1.0 / (w.gaps[i] + t);
      w.y[i] = up * w.c[i] * w.inverse[i];
    }
    SYNC;
    double square = 0.0, pull = 0.0;
    ROLLED for (int i = 0; i < n; ++i) {
      const double part = w.y[i] * w.y[i];
      square += part;
      pull += part * w.inverse[i];
    }
    const double over = rsqrt(square), excess = (base + t) * up * over - 1.0;
    if (excess > 0.0) upper = t; else lower = t;
    if (fabs(excess) <= 4e-16 || upper - lower <= 4e-16 * upper) break;
    const double norm = square * over;
    double next = t - excess * norm / (up * (1.0 + (base + t) * pull * (over * over)));
    if (!(lower < next && next < upper)) next = lower > 0.0 ? sqrt(lower * upper) : 0.5 * upper;
    if (next == t) break;
    t = next;
  }
  SYNC;
  EACH(i) w.y[i] = -w.c[i] / (w.gaps[i] + t);
  SYNC;
  const double others = length_of(n - 1, w.y + 1), mu = base + t;
  SYNC;
  if (LANE == 0 && base > 0.0 && fabs(w.y[0]) > 0.5 * mu && others < mu)
    w.y[0] = copysign(sqrt((mu - others) * (mu + others)), w.y[0]);
  SYNC;
  return t;
}

struct Cubic {
  double norm, decrease, share, last;
};

// The global minimiser of the cubic model; w.y is it in the basis of the eigenvectors.
FUNCTION Cubic minimise(int n, const double* values, const double* vectors, double start, double sigma, double sign,
                        Work& w) {
  const double least = values[0], a = larger(larger(-least, values[n - 1]), sqrt(sigma) * sqrt(start));
  const double by = 1.0 / a, base = larger(0.0, -least * by), scale = a / sigma;  // start, and so a, is not 0
  SYNC;
  EACH(i) {
    w.c[i] = (start * vectors[i] * by) * (sigma * by);
    w.gaps[i] = (least < 0.0 ? values[i] - least : values[i]) * by;  // never a sum of products: the first is 0 or exact
  }
  SYNC;
  const double t = secular(n, w, (start * by) * (sigma * by), base, sign);
  Cubic found = {0.0, 0.0, NAN, 0.0};
  double mu = base + t, slope = 0.0, bend = 0.0, negative = 0.0;
  ROLLED for (int i = 0; i < n; ++i) {
    const double value = values[i] * by, y = w.y[i], bent = value * y * y;
    slope += w.c[i] * y;
    bend += bent;
    if (value < 0.0) negative += -w.c[i] * y - 0.5 * bent;
    found.last += vectors[(n - 1) * MOST + i] * y;
  }
  found.norm = scale * mu;
  found.decrease = scale * scale * a * (0.5 * fabs(slope) + mu * mu * mu / 6.0);
  found.last *= scale;
  if (-slope - 0.5 * bend > 0.0) found.share = negative / (-slope - 0.5 * bend);
  SYNC;
  EACH(i) w.y[i] *= scale;
  SYNC;
  return found;
}

// The first j at which the gradient of the model may be within the tolerance; `doubts` is scratch of the lanes.
FUNCTION int first_doubt(const double* alpha, const double* beta, double start, double sigma, double tolerance,
                         double* doubts) {
  const int n = MOST;
  EACH(j) {
    double reach = 0.0, bound = start;
    ROLLED for (int i = 0; i <= j; ++i) reach = larger(reach, fabs(alpha[i]) + (i ? beta[i - 1] : 0.0) + beta[i]);
    const double shift = reach + 0.5 * (reach + sqrt(reach * reach + 4.0 * sigma * start)), by = 1.0 / shift;
    ROLLED for (int i = 0; i <= j; ++i) bound *= beta[i] * by;
    doubts[j] = !(0.0 < shift && finite_number(shift)) || !(bound > tolerance);
  }
  SYNC;
  int first = 1;
  while (first < n && doubts[first - 1] == 0.0) ++first;
  SYNC;
  return first;
}

FUNCTION double bounded(double sigma, const double* rules) {
  return larger(rules[RULE_FLOOR], smaller(sigma, rules[RULE_CEILING]));
}

FUNCTION double rejected(double sigma, const double* rules) {
  return smaller(sigma * rules[RULE_GAMMA], rules[RULE_REJECT_CEILING]);
}

KERNEL decide(const double* given, const double* orders, double* state, const double* value, const double* before,
              const double* x_norm, const double* coefficients, double* weights, double* report) {
  SHARED double vectors[MOST * MOST], rules[RULES], space[2 * MOST + 1];
  SHARED Work w;
  double values[MOST], off[MOST], beta[MOST];
  for (int i = LANE; i < RULES; i += LANES) rules[i] = given[i];  // all at once, not one after another when asked for
  for (int i = LANE; i < 2 * MOST + 1; i += LANES) space[i] = coefficients[i];
  const double at = *value, there = *before, size = *x_norm;
  SYNC;
  const double start = space[0], eps = rules[RULE_EPS], *alpha = space + 1, *found_beta = alpha + MOST;
  const bool told = orders[ORDER_SIGMA] == orders[ORDER_SIGMA];
  const double sigma = told ? orders[ORDER_SIGMA] : state[0], frozen = told ? 0.0 : state[1];
  double next = sigma, ritz = NAN, length = 0.0;
  int outcome = OUTCOME_MOVED, note = NOTE_NOTHING, dim = 0, plan = PLAN_STAYED;
  bool tried = false, spanned = false;
  Cubic step = {0.0, NAN, NAN, 0.0};
  SYNC;  // everybody has read the state
  if (frozen != 0.0) {
    outcome = OUTCOME_FROZEN;
  } else if (!finite_number(at) || !finite_number(start)) {
    outcome = OUTCOME_REFUSED;
    note = finite_number(at) ? NOTE_GRADIENT : NOTE_LOSS;
  } else if (start == 0.0) {
    outcome = OUTCOME_VANISHED;
  } else {
    const double tolerance = rules[RULE_TOLERANCE];
    int test_at = first_doubt(alpha, found_beta, start, sigma, tolerance, w.inverse);
    double scale = 0.0;
    bool known = false;
    for (bool last = false; !last && !known && note == NOTE_NOTHING;) {
      double a = alpha[dim], b = found_beta[dim];
      if (!finite_number(a) || !finite_number(b)) {
        note = NOTE_PRODUCT;
        break;
      }
      scale = larger(scale, fabs(a) + b + (dim ? beta[dim - 1] : 0.0));
      if (b <= 10.0 * eps * scale || dim + 1 == (int)rules[RULE_DIM]) b = 0.0;
      beta[dim++] = b;
      last = dim >= MOST || b == 0.0;
      if (!last && dim < test_at) continue;
      spectrum(dim, alpha, beta, values, off, vectors);
      double sign = orders[ORDER_HARD];
      if (rules[RULE_DESCENDS] != 0.0 && start * vectors[0] != 0.0) sign = -copysign(1.0, vectors[0]);
      if (last || b * fabs(vectors[(dim - 1) * MOST]) <= 0.5 * larger(rules[RULE_EPSILON], start)) {
        step = minimise(dim, values, vectors, start, sigma, sign, w);
        known = b * fabs(step.last) <= tolerance;
      }
      test_at = dim + 1 + (dim >= 10 ? dim / 5 - 1 : 0);
      SYNC;  // the next spectrum overwrites what others may still read
    }
    if (note == NOTE_PRODUCT) {
      step.norm = 0.0;
      step.decrease = step.share = NAN;
      next = rejected(sigma, rules);
    } else {
      spanned = true;
      ritz = values[0];
      if (step.norm <= eps * size) {
        note = NOTE_ROUNDING;
        next = bounded(sigma / (rules[RULE_GAMMA] * rules[RULE_GAMMA]), rules);
      } else if (!(size + step.norm < rules[RULE_FAR])) {
        note = NOTE_TRIAL;
        next = rejected(sigma, rules);
      } else {
        tried = true;
        if (!finite_number(there)) {
          outcome = OUTCOME_REFUSED;
          note = NOTE_OBJECTIVE;
        }
      }
    }
  }
  if (outcome == OUTCOME_REFUSED) next = rejected(sigma, rules);
  const bool moves = outcome == OUTCOME_MOVED;
  if (moves && rules[RULE_ESCAPES] != 0.0) {
    plan = PLAN_GRADIENT;
    if (spanned && ritz < rules[RULE_GUARD]) {
      double ratio = ritz / rules[RULE_L2];
      double curvature = ratio * ratio * ((-2.0 / 3.0) * ritz - (1.0 / 6.0) * rules[RULE_EPSILON]);
      if (curvature * rules[RULE_L1] > 0.25 * start * start - rules[RULE_SLACK]) plan = PLAN_CURVATURE;
    } else if (spanned && rules[RULE_STAYS] != 0.0) {
      plan = PLAN_STAYED;
    }
    if (plan != PLAN_STAYED)
      length = plan == PLAN_CURVATURE ? -2.0 * ritz / rules[RULE_L2] : 1.0 / rules[RULE_L1];
  }
  double along = 0.0;
  if (plan == PLAN_CURVATURE) {
    bool slopes = rules[RULE_DESCENDS] != 0.0 && start * vectors[0] != 0.0;
    along = length * (slopes ? -copysign(1.0, vectors[0]) : orders[ORDER_COIN]);
  }
  ROLLED for (int row = LANE; row < MOST; row += LANES) {
    double u = 0.0;
    if (moves && tried && row < dim)
      ROLLED for (int i = 0; i < dim; ++i) u += vectors[row * MOST + i] * w.y[i];
    weights[row] = u;
    weights[MOST + row] = plan == PLAN_CURVATURE && row < dim ? along * vectors[row * MOST] : 0.0;
  }
  if (LANE != 0) return;
  weights[2 * MOST] = plan == PLAN_GRADIENT ? -length : 0.0;
  state[0] = sigma;
  state[1] = frozen;
  report[REPORT_OUTCOME] = outcome;
  report[REPORT_NOTE] = note;
  report[REPORT_SIGMA] = sigma;
  report[REPORT_NEXT_SIGMA] = next;
  report[REPORT_VALUE] = at;
  report[REPORT_BEFORE] = there;
  report[REPORT_GRAD_NORM] = start;
  report[REPORT_X_NORM] = size;
  report[REPORT_DIM] = dim;
  report[REPORT_RITZ_VALUE] = ritz;
  report[REPORT_DECREASE] = step.decrease;
  report[REPORT_NORM] = step.norm;
  report[REPORT_SHARE] = step.share;
  report[REPORT_TRIED] = tried;
  report[REPORT_PLAN] = plan;
  report[REPORT_LENGTH] = length;
  report[REPORT_VERDICT] = report[REPORT_ESCAPED] = 0.0;
}

// 0, 1 or 2 for a step that failed, succeeded or succeeded very well.
FUNCTION int verdict_on(const double* rules, double actual, double predicted) {
  if (!finite_number(actual) || !finite_number(predicted) || predicted <= 0.0) return 0;
  return actual > rules[RULE_ETA2] * predicted ? 2 : actual >= rules[RULE_ETA1] * predicted;
}

FUNCTION double scaled_sigma(double sigma, double t, double pull) {
  return sigma * larger((t + (1.0 - t) * pull) / (t * t), 1e-3);
}

FUNCTION double judged_sigma(const double* rules, const double* report, double actual, int verdict) {
  const double sigma = report[REPORT_SIGMA], norm = report[REPORT_NORM], predicted = report[REPORT_DECREASE];
  if (rules[RULE_INTERPOLATES] == 0.0) {
    if (verdict == 2) return larger(smaller(sigma, report[REPORT_GRAD_NORM]), rules[RULE_FLOOR]);
    return verdict == 0 ? rejected(sigma, rules) : sigma;
  }
  const double cube = norm * norm * norm;
  if (sigma * cube <= 0.0) return verdict == 0 ? rejected(sigma, rules) : sigma;
  const double pull = larger(2.0 * predicted / (sigma * cube) - 1.0 / 3.0, 0.0);
  if (!finite_number(actual)) return bounded(scaled_sigma(sigma, 0.1, pull), rules);
  const double seen = predicted <= 0.0 ? sigma : sigma + 3.0 * (predicted - actual) / cube;
  if (verdict == 0)
    return bounded(smaller(larger(seen, scaled_sigma(sigma, 0.5, pull)), scaled_sigma(sigma, 0.1, pull)), rules);
  return verdict == 2 ? bounded(smaller(larger(seen, scaled_sigma(sigma, 3.0, pull)), sigma), rules) : sigma;
}

// Which point is taken: 0 for x, 1 for the cubic step, 2 for the other.
FUNCTION int choice_of(const double* rules, const double* report, double reached, double there) {
  if (report[REPORT_OUTCOME] != OUTCOME_MOVED) return 0;
  const bool tried = report[REPORT_TRIED] != 0.0;
  const double at = tried ? report[REPORT_BEFORE] : report[REPORT_VALUE];
  if (tried && verdict_on(rules, at - reached, report[REPORT_DECREASE])) return 1;
  const double length = report[REPORT_LENGTH] * (report[REPORT_PLAN] == PLAN_GRADIENT ? report[REPORT_GRAD_NORM] : 1.0);
  const bool near = report[REPORT_X_NORM] + length < rules[RULE_FAR];
  return report[REPORT_PLAN] != PLAN_STAYED && near && finite_number(at + there) ? 2 : 0;
}

// Write down what became of the step.
FUNCTION void close_books(const double* rules, double* state, double* report, double reached, double there) {
  const int outcome = (int)report[REPORT_OUTCOME];
  report[REPORT_ESCAPED] = choice_of(rules, report, reached, there) == 2;
  if (outcome == OUTCOME_MOVED && report[REPORT_TRIED] != 0.0) {
    const double actual = report[REPORT_BEFORE] - reached;
    const int verdict = verdict_on(rules, actual, report[REPORT_DECREASE]);
    report[REPORT_NEXT_SIGMA] = judged_sigma(rules, report, actual, verdict);
    report[REPORT_VERDICT] = verdict;
  }
  report[REPORT_REACHED] = reached;
  report[REPORT_THERE] = there;
  if (outcome == OUTCOME_MOVED || outcome == OUTCOME_REFUSED) state[0] = report[REPORT_NEXT_SIGMA];
  if (outcome == OUTCOME_VANISHED) state[1] = 1.0;
}

#ifdef HOST
KERNEL conclude(const double* rules, double* state, double* report, const double* reached, const double* there,
                int* choice) {
  *choice = choice_of(rules, report, *reached, *there);
  close_books(rules, state, report, *reached, *there);
}
#else

typedef unsigned long long address;
typedef long long place;

#define FIRST ((place)blockIdx.x * blockDim.x + threadIdx.x)
#define STRIDE ((place)gridDim.x * blockDim.x)

// The chosen point, leaf by leaf: blockIdx.y is the leaf; `table` has its address, where it begins and its size.
KERNEL conclude(const double* rules, double* state, double* report, const double* reached, const double* there,
                const real* x, const real* trial, const real* other, const place* table) {
  const int choice = choice_of(rules, report, *reached, *there);
  const place* leaf = table + 3 * blockIdx.y;
  const real* from = (choice == 1 ? trial : choice == 2 ? other : x) + leaf[1];
  real* into = (real*)(address)leaf[0];
  ROLLED for (place i = FIRST; i < leaf[2]; i += STRIDE) into[i] = from[i];
  // The entries that other blocks read for their choice stay as they are.
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) close_books(rules, state, report, *reached, *there);
}

// Hand the last report to the host and take its orders: `mailed` and `mail` are the host's own memory.
KERNEL exchange(const double* report, double* mailed, int size, const double* mail, double* orders, int count) {
  const int k = threadIdx.x;
  if (k < size) ((volatile double*)mailed)[k] = report[k];
  if (k < count) orders[k] = ((const volatile double*)mail)[k];
}

// Both points in one pass over the basis.
KERNEL combine(const double* weights, const real* x, const real* g, const real* rows, int d, real* trial, real* other) {
  ROLLED for (place i = FIRST; i < d; i += STRIDE) {
    real here = x[i], there = here + (real)weights[2 * MOST] * g[i];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
      real q = rows[(place)k * d + i];
      here += (real)weights[k] * q;
      there += (real)weights[MOST + k] * q;
    }
    trial[i] = here;
    other[i] = there;
  }
}

#define WARPS (blockDim.x / 32)
#define AT_ONCE 4

FUNCTION double over_warp(double sum) {
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// Sums are made in two halves: every block leaves its part, and the kernels that need a sum add the parts up, all in
// the same order, before they begin. So nobody has to come last.
template <int most> FUNCTION void leave_parts(const double (&own)[most], int count, double* parts) {
  __shared__ double sums[most][32];
#pragma unroll
  for (int k = 0; k < most; ++k) {
    double sum = k < count ? over_warp(own[k]) : 0.0;
    if (threadIdx.x % 32 == 0) sums[k][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  const int k = threadIdx.x / 32, lane = threadIdx.x % 32;  // one warp for each sum
  if (k >= most || k >= count) return;
  const double sum = over_warp(lane < WARPS ? sums[k][lane] : 0.0);
  if (lane == 0) parts[(place)k * SUM_BLOCKS + blockIdx.x] = sum;
}

// Add up `count` sums of parts, for the whole block to read.
FUNCTION void gather_parts(const double* parts, int count, double* sums) {
  const int lane = threadIdx.x % 32;
  ROLLED for (int k = threadIdx.x / 32; k < count; k += WARPS) {
    double sum = 0.0;
    for (int b = lane; b < SUM_BLOCKS; b += 32) sum += parts[(place)k * SUM_BLOCKS + b];
    sum = over_warp(sum);
    if (lane == 0) sums[k] = sum;
  }
  __syncthreads();
}

// Inner products of r with `count` rows, at most AT_ONCE.
KERNEL dots(const real* r, const real* rows, int count, int d, double* parts) {
  double own[AT_ONCE] = {};
  ROLLED for (place i = FIRST; i < d; i += STRIDE) {
    double entry = r[i];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
      if (k < count) own[k] += entry * (double)rows[(place)k * d + i];
  }
  leave_parts(own, count, parts);
}

// Take `count` rows out of r, by inner products whose parts are given, and leave the parts of its square; `last` is the
// inner product with the last of them.
KERNEL take_out(real* r, const real* rows, int count, int d, const double* given, double* last, double* parts) {
  __shared__ double sums[MOST];
  double own[1] = {};
  if (count) gather_parts(given, count, sums);
  ROLLED for (place i = FIRST; i < d; i += STRIDE) {
    double entry = r[i];
    if (count) {
      ROLLED for (int k = 0; k < count; ++k) entry -= sums[k] * (double)rows[(place)k * d + i];
      r[i] = (real)entry;
    }
    own[0] += entry * entry;
  }
  leave_parts(own, 1, parts);
  if (count && blockIdx.x == 0 && threadIdx.x == 0) *last = sums[count - 1];
}

// row = r / |r|, from the parts of its square, with zeros where that is not finite: the coefficients tell, and no weight
// is not zero there. Without a row only the length is written.
KERNEL normalise(const real* r, int d, const double* parts, double* length, real* row, int writes) {
  __shared__ double square[1];
  gather_parts(parts, 1, square);
  const double found = sqrt(square[0]), by = found > 0.0 ? 1.0 / found : 0.0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *length = found;
  if (!writes) return;
  ROLLED for (place i = FIRST; i < d; i += STRIDE) {
    double entry = r[i] * by;
    row[i] = finite_number((double)(real)entry) ? (real)entry : (real)0.0;
  }
}
#endif
