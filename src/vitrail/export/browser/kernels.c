// Float32 kernels of the HTML export, compiled to WebAssembly with SIMD by scripts/build_kernels.py.
//
// export/kernel_program.py translates a model to a list of calls of the exported functions, in which
// every size, stride and address is a constant. Tensors are row-major; strides count elements.

typedef float f4 __attribute__((vector_size(16), aligned(4)));
typedef int i4 __attribute__((vector_size(16), aligned(4)));
#define EXPORT(name) __attribute__((export_name(#name), visibility("default")))
#define PANEL 8 // columns of B in a panel: with 4 rows of A, 8 of the 16 vector registers

void *memset(void *start, int value, unsigned long count) {
  for (unsigned long i = 0; i < count; i++) ((char *)start)[i] = (char)value;
  return start;
}

static f4 splat(float x) { return (f4){x, x, x, x}; }
static f4 select(i4 mask, f4 a, f4 b) { return (f4)((mask & (i4)a) | (~mask & (i4)b)); }

static f4 exp4(f4 x) {
  // 2^n times a polynomial of the remainder, to 1e-7; below -87 the result is 0.
  i4 tiny = x < splat(-87.0f);
  x = select(x > splat(88.0f), splat(88.0f), select(tiny, splat(-87.0f), x));
  f4 n = __builtin_wasm_nearest_f32x4(x * splat(1.44269504f));
  f4 r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
  f4 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  f4 y = p * r * r + r + splat(1.0f);
  i4 power = (__builtin_convertvector(n, i4) + 127) << 23;
  return select(tiny, splat(0.0f), y * (f4)power);
}

static f4 sigmoid4(f4 x) { return splat(1.0f) / (splat(1.0f) + exp4(-x)); }

static f4 erf4(f4 x) {
  // Abramowitz and Stegun 7.1.26: 1.5e-7.
  f4 z = (f4)((i4)x & 0x7fffffff), t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * z);
  f4 p = splat(1.061405429f);
  p = p * t - splat(1.453152027f);
  p = p * t + splat(1.421413741f);
  p = p * t - splat(0.284496736f);
  p = p * t + splat(0.254829592f);
  f4 y = splat(1.0f) - p * t * exp4(-z * z);
  return (f4)((i4)y | ((i4)x & (int)0x80000000));
}

static f4 apply(int operation, f4 x) {
  switch (operation) {
    case 0: return x * splat(0.5f) * (splat(1.0f) + erf4(x * splat(0.70710678f))); // GELU
    case 1: { // its approximation by tanh: x sigmoid(2 u)
      return x * sigmoid4(x * (splat(1.59576912f) + splat(0.07135481f) * x * x));
    }
    case 2: return sigmoid4(x);
    case 3: return splat(2.0f) * sigmoid4(x + x) - splat(1.0f); // tanh
    default: return select(x > splat(0.0f), x, splat(0.0f)); // ReLU
  }
}

EXPORT(unary) void unary(int operation, float *out, const float *x, int count) {
  for (int i = 0; i < count; i += 4) { // buffers are padded to multiples of 16 bytes
    *(f4 *)(out + i) = apply(operation, *(const f4 *)(x + i));
  }
}

static float combine(int operation, float a, float b) {
  return operation == 0 ? a + b : operation == 1 ? a - b : operation == 2 ? a * b : a / b;
}

static f4 combine4(int operation, f4 a, f4 b) {
  return operation == 0 ? a + b : operation == 1 ? a - b : operation == 2 ? a * b : a / b;
}

EXPORT(binary)
void binary(int operation, float *out, const float *a, const float *b, int d0, int d1, int d2,
            int d3, int a0, int a1, int a2, int a3, int b0, int b1, int b2, int b3) {
  // Elementwise with broadcasting: a stride of 0 repeats.
  for (int i = 0; i < d0; i++)
    for (int j = 0; j < d1; j++)
      for (int k = 0; k < d2; k++) {
        const float *x = a + i * a0 + j * a1 + k * a2, *y = b + i * b0 + j * b1 + k * b2;
        int l = 0;
        if (a3 <= 1 && b3 <= 1)
          for (; l + 4 <= d3; l += 4) {
            f4 p = a3 ? *(const f4 *)(x + l) : splat(*x), q = b3 ? *(const f4 *)(y + l) : splat(*y);
            *(f4 *)(out + l) = combine4(operation, p, q);
          }
        for (; l < d3; l++) out[l] = combine(operation, x[l * a3], y[l * b3]);
        out += d3;
      }
}

EXPORT(copy)
void copy(float *out, const float *x, int d0, int d1, int d2, int d3, int d4, int o0, int o1,
          int o2, int o3, int o4, int x0, int x1, int x2, int x3, int x4) {
  // Transpose, slice, concatenate, repeat and pad: all are copies with strides.
  for (int i = 0; i < d0; i++)
    for (int j = 0; j < d1; j++)
      for (int k = 0; k < d2; k++)
        for (int l = 0; l < d3; l++) {
          float *to = out + i * o0 + j * o1 + k * o2 + l * o3;
          const float *from = x + i * x0 + j * x1 + k * x2 + l * x3;
          int m = 0;
          if (o4 == 1 && x4 == 1)
            for (; m + 4 <= d4; m += 4) *(f4 *)(to + m) = *(const f4 *)(from + m);
          for (; m < d4; m++) to[m * o4] = from[m * x4];
        }
}

EXPORT(fill) void fill(float *out, int count, float value) {
  for (int i = 0; i < count; i++) out[i] = value;
}

EXPORT(gather)
void gather(float *out, const float *x, const float *index, int outer, int rows, int width,
            int count) {
  // Along the last axis; the index (rows, count) is the same for all of `outer`.
  for (int i = 0; i < outer * rows; i++)
    for (int j = 0; j < count; j++)
      out[i * count + j] = x[i * width + (int)index[i % rows * count + j]];
}

EXPORT(reduce)
void reduce(float *out, const float *x, int outer, int size, int inner, float scale) {
  // The sum over the middle axis, times `scale`.
  for (int i = 0; i < outer; i++)
    for (int k = 0; k < inner; k++) {
      double sum = 0;
      for (int j = 0; j < size; j++) sum += x[(i * size + j) * inner + k];
      out[i * inner + k] = (float)sum * scale;
    }
}

EXPORT(softmax) void softmax(float *out, const float *x, int rows, int width) {
  for (int i = 0; i < rows; i++, x += width, out += width) {
    float largest = x[0], sum = 0;
    for (int j = 1; j < width; j++) largest = x[j] > largest ? x[j] : largest;
    f4 sums = splat(0.0f);
    int j = 0;
    for (; j + 4 <= width; j += 4) {
      f4 y = exp4(*(const f4 *)(x + j) - splat(largest));
      *(f4 *)(out + j) = y;
      sums += y;
    }
    for (; j < width; j++) sum += out[j] = exp4(splat(x[j] - largest))[0];
    sum += sums[0] + sums[1] + sums[2] + sums[3];
    for (j = 0; j < width; j++) out[j] /= sum;
  }
}

EXPORT(layer_norm)
void layer_norm(float *out, const float *x, const float *weight, const float *bias, int rows,
                int width, float epsilon) {
  // Without weight and bias (address 0), only normalized.
  for (int i = 0; i < rows; i++, x += width, out += width) {
    double sum = 0, squares = 0;
    for (int j = 0; j < width; j++) sum += x[j];
    double mean = sum / width;
    for (int j = 0; j < width; j++) squares += (x[j] - mean) * (x[j] - mean);
    float scale = (float)(1 / __builtin_sqrt(squares / width + epsilon)), center = (float)mean;
    if (weight)
      for (int j = 0; j < width; j++) out[j] = (x[j] - center) * scale * weight[j] + bias[j];
    else
      for (int j = 0; j < width; j++) out[j] = (x[j] - center) * scale;
  }
}

EXPORT(im2col)
void im2col(float *out, const float *x, int channels, int height, int width, int kernel_h,
            int kernel_w, int stride_h, int stride_w, int top, int left, int rows, int columns) {
  // (channels * kernel_h * kernel_w, rows * columns): a convolution is a product with it.
  for (int c = 0; c < channels; c++)
    for (int i = 0; i < kernel_h; i++)
      for (int j = 0; j < kernel_w; j++)
        for (int row = 0; row < rows; row++) {
          int y = row * stride_h + i - top;
          for (int column = 0; column < columns; column++) {
            int at = column * stride_w + j - left;
            int inside = y >= 0 && y < height && at >= 0 && at < width;
            *out++ = inside ? x[(c * height + y) * width + at] : 0;
          }
        }
}

EXPORT(max_pool)
void max_pool(float *out, const float *x, int channels, int height, int width, int kernel_h,
              int kernel_w, int stride_h, int stride_w, int top, int left, int rows, int columns) {
  for (int c = 0; c < channels; c++)
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < columns; column++) {
        float largest = -__builtin_inff();
        for (int i = 0; i < kernel_h; i++)
          for (int j = 0; j < kernel_w; j++) {
            int y = row * stride_h + i - top, at = column * stride_w + j - left;
            if (y < 0 || y >= height || at < 0 || at >= width) continue;
            float value = x[(c * height + y) * width + at];
            largest = value > largest ? value : largest;
          }
        *out++ = largest;
      }
}

static void tile(float *out, int n, const float *a, int k, const float *panel, int rows,
                 int columns) {
  // `rows` (up to 4) by `columns` (up to 8) of the product.
  const float *a1 = rows > 1 ? a + k : a, *a2 = rows > 2 ? a1 + k : a, *a3 = rows > 3 ? a2 + k : a;
  f4 c[4][2] = {{splat(0), splat(0)}, {splat(0), splat(0)}, {splat(0), splat(0)}, {splat(0), splat(0)}};
  for (int i = 0; i < k; i++, panel += PANEL) {
    f4 b0 = *(const f4 *)panel, b1 = *(const f4 *)(panel + 4);
    c[0][0] += splat(a[i]) * b0, c[0][1] += splat(a[i]) * b1;
    c[1][0] += splat(a1[i]) * b0, c[1][1] += splat(a1[i]) * b1;
    c[2][0] += splat(a2[i]) * b0, c[2][1] += splat(a2[i]) * b1;
    c[3][0] += splat(a3[i]) * b0, c[3][1] += splat(a3[i]) * b1;
  }
  for (int row = 0; row < rows; row++, out += n)
    if (columns == PANEL) {
      *(f4 *)out = c[row][0];
      *(f4 *)(out + 4) = c[row][1];
    } else
      for (int j = 0; j < columns; j++) out[j] = c[row][j / 4][j % 4];
}

EXPORT(matmul)
void matmul(float *out, const float *a, const float *b, float *scratch, int batch, int m, int k,
            int n, int a_stride, int b_stride) {
  // (batch, m, k) @ (batch, k, n); a stride of 0 repeats a matrix. `scratch` holds 8 k values.
  for (int i = 0; i < batch; i++, out += m * n, a += a_stride, b += b_stride)
    for (int column = 0; column < n; column += PANEL) {
      int columns = n - column < PANEL ? n - column : PANEL;
      for (int row = 0; row < k; row++)
        for (int j = 0; j < PANEL; j++)
          scratch[row * PANEL + j] = j < columns ? b[row * n + column + j] : 0;
      for (int row = 0; row < m; row += 4)
        tile(out + row * n + column, n, a + row * k, k, scratch, m - row < 4 ? m - row : 4, columns);
    }
}
