// Vectors of L elements, in the vector extensions of GCC and Clang. Truth values are vectors of int: 0 and -1.
typedef long long i64; typedef unsigned long long u64; typedef int i32; typedef unsigned int u32;
typedef short i16; typedef unsigned short u16; typedef signed char i8; typedef unsigned char u8;
template<class T> struct vector_of { typedef T type __attribute__((vector_size(L * sizeof(T)))); };
template<class T> using V = typename vector_of<T>::type;
typedef V<i32> M;
template<class A, class B> static inline A bits(B b) { A a; static_assert(sizeof a == sizeof b); __builtin_memcpy(&a, &b, sizeof a); return a; }
template<class T, class S> static inline V<T> convert(S x) { return __builtin_convertvector(x, V<T>); }
static const i32 LANE_NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define LANES bits_of_lanes()
static inline M bits_of_lanes() { M m; __builtin_memcpy(&m, LANE_NUMBERS, sizeof m); return m; }
static inline M active(i64 n) { return LANES < (i32)n; }
static inline M last_lanes(i64 n) { return LANES >= (i32)(L - n); }
template<class T> static inline V<T> splat(T x) { V<T> v; for (int i = 0; i < L; ++i) v[i] = x; return v; }
static inline V<i64> lanes(i64 start) { return convert<i64>(LANES) + start; }

// memory: n elements, L where there are as many
template<class T> static inline V<T> load(const T* p) { V<T> v; __builtin_memcpy(&v, p, sizeof v); return v; }
template<class T> static inline V<T> load(const T* p, i64 n) { V<T> v{}; __builtin_memcpy(&v, p, n * sizeof(T)); return v; }
template<class T> static inline void store(T* p, V<T> v) { __builtin_memcpy(p, &v, sizeof v); }
template<class T> static inline void store(T* p, V<T> v, i64 n) { __builtin_memcpy(p, &v, n * sizeof(T)); }
template<class T> static inline V<T> strided(const T* p, i64 step, i64 n) { T t[L] = {}; for (int i = 0; i < n; ++i) t[i] = p[i * step]; return load(t); }
template<class T> static inline void strided(T* p, i64 step, V<T> v, i64 n) { T t[L]; store(t, v); for (int i = 0; i < n; ++i) p[i * step] = t[i]; }
// of 4 bytes: p[0], p[2] ... and p[0], p[-1] ..., which read nothing beside what lies between their ends
#ifdef __clang__
template<class T> static inline V<T> every_second(const T* p) { return strided(p, 2, L); }
template<class T> static inline V<T> backwards(const T* p) { return strided(p, -1, L); }
#else
template<class T> static inline V<T> every_second(const T* p) { return __builtin_shuffle(load(p), load(p + L - 1), LANES * 2 - (LANES >= L / 2)); }
template<class T> static inline V<T> backwards(const T* p) { return __builtin_shuffle(load(p - L + 1), L - 1 - LANES); }
#endif
template<class T> static inline V<T> apart(const T* p, V<i64> at, i64 n) { T t[L] = {}; i64 a[L]; store(a, at); for (int i = 0; i < n; ++i) t[i] = p[a[i]]; return load(t); }
template<class T> static inline void apart(T* p, V<i64> at, V<T> v, i64 n) { T t[L]; i64 a[L]; store(a, at); store(t, v); for (int i = 0; i < n; ++i) p[a[i]] = t[i]; }
template<class T> static inline V<T> apart(const T* p, V<i64> at, i64 n, M m) { T t[L] = {}; i64 a[L]; store(a, at); for (int i = 0; i < n; ++i) if (m[i]) t[i] = p[a[i]]; return load(t); }
template<class T> static inline void scatter_sum(T* p, V<i64> at, V<T> v, i64 n) { T t[L]; i64 a[L]; store(a, at); store(t, v); for (int i = 0; i < n; ++i) p[a[i]] += t[i]; }
static inline i64 inside(i64 x, i64 n, int& bad) { bool in = (u64)x < (u64)n; bad |= !in; return in ? x : 0; }
static inline V<i64> inside(V<i64> x, i64 n, int& bad, i64 count) { for (int i = 0; i < L; ++i) { bool in = (u64)x[i] < (u64)n; bad |= !in && i < count; if (!in) x[i] = 0; } return x; }

// choices and comparisons
template<class T> static inline V<T> choose(M c, V<T> a, V<T> b) { return __builtin_convertvector(c, decltype(a < b)) ? a : b; }
#define COMPARE(name, sign) template<class X> static inline M name(X a, X b) { return __builtin_convertvector(a sign b, M); }
COMPARE(eq, ==) COMPARE(ne, !=) COMPARE(lt, <) COMPARE(le, <=) COMPARE(gt, >) COMPARE(ge, >=)
template<class T> static inline V<T> of_truth(M m) { return convert<T>(-m); }
template<class X> static inline M truth(X x) { return __builtin_convertvector(x != X{}, M); }
template<class X> static inline X maximum(X a, X b) { return (a > b) | (a != a) ? a : b; }
template<class X> static inline X minimum(X a, X b) { return (a < b) | (a != a) ? a : b; }
template<class X> static inline X fmax_(X a, X b) { return (a > b) | (b != b) ? a : b; }
template<class X> static inline X fmin_(X a, X b) { return (a < b) | (b != b) ? a : b; }
template<class X> static inline X sign_(X x) { X one = X{} + 1; return (x > X{}) ? one : ((x < X{}) ? X{} - one : X{}); }
static inline V<float> abs_(V<float> x) { return bits<V<float>>(bits<V<i32>>(x) & 0x7fffffff); }
static inline V<double> abs_(V<double> x) { return bits<V<double>>(bits<V<i64>>(x) & 0x7fffffffffffffffLL); }
template<class X> static inline X abs_(X x) { return x < X{} ? -x : x; }
static inline M signbit_(V<float> x) { return bits<V<i32>>(x) < 0; }
static inline M signbit_(V<double> x) { return convert<i32>(bits<V<i64>>(x) < 0); }
template<class X> static inline X floor_divide(X a, X b) { X q = a / b; return (q * b > a) ? q - 1 : q; }
template<class X> static inline X remainder_(X a, X b) { X r = a % b; return (r < X{}) ? r + b : r; }

// numbers from [0, 1): Philox 4x32 of ten rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3)
static inline V<float> uniform(V<i64> seed, u64 offset, V<i64> element) {
  const u64 low = 0xffffffffu;
  V<u64> k0 = bits<V<u64>>(seed) & low, k1 = bits<V<u64>>(seed) >> 32, e = bits<V<u64>>(element);
  V<u64> c0 = V<u64>{} + offset, c1{}, c2 = e & low, c3 = e >> 32;
  for (int i = 0; i < 10; ++i) {
    V<u64> p = c0 * 0xD2511F53u, q = c2 * 0xCD9E8D57u;
    c0 = (q >> 32) ^ c1 ^ k0; c1 = q & low; c2 = (p >> 32) ^ c3 ^ k1; c3 = p & low;
    k0 = (k0 + 0x9E3779B9u) & low; k1 = (k1 + 0xBB67AE85u) & low;
  }
  return convert<float>(convert<i32>(c0 >> 8)) * 0x1p-24f;
}

// 16-bit floats, rounded to the nearest even
static inline V<float> of_bfloat16(V<u16> x) { return bits<V<float>>(convert<u32>(x) << 16); }
static inline V<u16> to_bfloat16(V<float> x) { V<u32> b = bits<V<u32>>(x); b = (b + 0x7fff + ((b >> 16) & 1)) >> 16; return convert<u16>((x == x) ? b : V<u32>{} + 0x7fc0); }
static inline V<float> of_float16(V<u16> x) {
  V<u32> h = convert<u32>(x), e = h & 0x7c00u;
  V<u32> b = bits<V<u32>>(bits<V<float>>((h & 0x7fffu) << 13) * 0x1p112f);
  b = (e == 0x7c00u) ? (b | 0x7f800000u) : b;
  return bits<V<float>>(b | ((h & 0x8000u) << 16));
}
static inline V<u16> to_float16(V<float> x) {
  V<u32> b = bits<V<u32>>(x), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
  V<u32> small = bits<V<u32>>(bits<V<float>>(a) + 0.5f) - 0x3f000000u;
  V<u32> usual = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  V<u32> r = (a < 0x38800000u) ? small : usual;
  r = (a >= 0x47800000u) ? V<u32>{} + 0x7c00u : r;
  r = (a > 0x7f800000u) ? V<u32>{} + 0x7e00u : r;
  return convert<u16>(r | sign);
}

// functions of each lane, and of vectors
#define LANEWISE(name, narrow, wide) \
  static inline V<float> name(V<float> x) { float t[L]; store(t, x); for (int i = 0; i < L; ++i) t[i] = narrow(t[i]); return load(t); } \
  static inline V<double> name(V<double> x) { double t[L]; store(t, x); for (int i = 0; i < L; ++i) t[i] = wide(t[i]); return load(t); }
#define LANEWISE2(name, narrow, wide) \
  static inline V<float> name(V<float> x, V<float> y) { float t[L], u[L]; store(t, x); store(u, y); for (int i = 0; i < L; ++i) t[i] = narrow(t[i], u[i]); return load(t); } \
  static inline V<double> name(V<double> x, V<double> y) { double t[L], u[L]; store(t, x); store(u, y); for (int i = 0; i < L; ++i) t[i] = wide(t[i], u[i]); return load(t); }
typedef double half_of_doubles __attribute__((vector_size(L * 4)));
struct two_halves { half_of_doubles a, b; };
#define VECTORS(name, narrow, wide) \
  extern "C" V<float> narrow(V<float>); extern "C" half_of_doubles wide(half_of_doubles); \
  static inline V<float> name(V<float> x) { return narrow(x); } \
  static inline V<double> name(V<double> x) { two_halves h = bits<two_halves>(x); h.a = wide(h.a); h.b = wide(h.b); return bits<V<double>>(h); }
#define VECTORS2(name, narrow, wide) \
  extern "C" V<float> narrow(V<float>, V<float>); extern "C" half_of_doubles wide(half_of_doubles, half_of_doubles); \
  static inline V<float> name(V<float> x, V<float> y) { return narrow(x, y); } \
  static inline V<double> name(V<double> x, V<double> y) { two_halves h = bits<two_halves>(x), k = bits<two_halves>(y); h.a = wide(h.a, k.a); h.b = wide(h.b, k.b); return bits<V<double>>(h); }
LANEWISE(sqrt_, __builtin_sqrtf, __builtin_sqrt) LANEWISE(floor_, __builtin_floorf, __builtin_floor)
LANEWISE(ceil_, __builtin_ceilf, __builtin_ceil) LANEWISE(trunc_, __builtin_truncf, __builtin_trunc)
LANEWISE(round_, __builtin_nearbyintf, __builtin_nearbyint) LANEWISE2(copysign_, __builtin_copysignf, __builtin_copysign)

// reductions
template<class X> static inline X add_(X a, X b) { return a + b; }
template<class X> static inline X mul_(X a, X b) { return a * b; }
#define ACROSS(name, function) template<class T> static inline T name(V<T> v) { T t[2 * L]; store(t, v); \
  for (int k = L / 2; k; k /= 2) { V<T> a = load(t), b = load(t + k); store(t, function(a, b)); } return t[0]; }
// of n elements, each one combined with those before it; all: what was before them, and then with them
template<class A> struct half_of { typedef A type __attribute__((vector_size(L * 4))); };  // L / 2 elements of 8 bytes
template<class A> using H = typename half_of<A>::type;
#ifdef __clang__
#define RUNNING(name, sign, none) template<class T, class A> static inline V<T> name(V<T> v, A& all, i64 n) { T t[L]; store(t, v); \
  for (i64 i = 0; i < n; ++i) { all = all sign t[i]; t[i] = (T)all; } return load(t); }
#else
static const i64 HALF_LANES[8] = {0, 1, 2, 3, 4, 5, 6, 7};
template<int k, class A> static inline H<A> later(H<A> v, A none) {
  H<i64> lane; __builtin_memcpy(&lane, HALF_LANES, sizeof lane);
  return __builtin_shuffle(H<A>{} + none, v, (lane < k) ? lane : lane + (L / 2 - k));
}
#define RUNNING(name, sign, none) \
  template<class A> static inline H<A> half_##name(H<A> v, A& all) { \
    v = v sign later<1, A>(v, none); if (L > 4) v = v sign later<2, A>(v, none); if (L > 8) v = v sign later<4, A>(v, none); \
    v = v sign (H<A>{} + all); all = v[L / 2 - 1]; return v; } \
  template<class T, class A> static inline V<T> name(V<T> x, A& all, i64 n) { \
    V<A> wide = convert<A>(choose<T>(active(n), x, splat<T>(none))); H<A> h[2]; __builtin_memcpy(h, &wide, sizeof wide); \
    h[0] = half_##name<A>(h[0], all); h[1] = half_##name<A>(h[1], all); __builtin_memcpy(&wide, h, sizeof wide); return convert<T>(wide); }
#endif
RUNNING(running_sum, +, 0) RUNNING(running_prod, *, 1)
ACROSS(across_sum, add_) ACROSS(across_prod, mul_) ACROSS(across_amax, maximum) ACROSS(across_amin, minimum)
#ifdef _OPENMP
extern "C" int omp_get_thread_num(void); extern "C" int omp_get_num_threads(void);
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
#endif
