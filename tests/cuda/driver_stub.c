/* A stand-in for libcuda.so.1: notes that it was opened and how it was called, one line each, in
   the file $DRIVER_STUB_LOG. Kernels are not run; of a launch it tells the grid, the block, the
   shared bytes, the stream and the parameters, taken as (pointer, int32, int64, float). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void tell(const char *format, ...) {
  const char *path = getenv("DRIVER_STUB_LOG");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

__attribute__((constructor)) static void opened(void) { tell("opened"); }

static void *current;

int cuInit(unsigned flags) { return (int)flags; }
/* NVRTC opens the driver of its own accord where there is one, and asks it for this. */
int cuGetExportTable(const void **table, const void *id) {
  return *table = NULL, id ? 500 : 1; /* CUDA_ERROR_NOT_FOUND */
}
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  tell("retain %d", device);
  return *context = (void *)(intptr_t)(100 + device), 0;
}
int cuCtxGetCurrent(void **context) { return *context = current, 0; }
int cuCtxSetCurrent(void *context) {
  tell("bind %d", (int)(intptr_t)context);
  return current = context, 0;
}
int cuCtxPushCurrent(void *context) { return tell("push %d", (int)(intptr_t)context), 0; }
int cuCtxPopCurrent(void **context) { return *context = NULL, tell("pop"), 0; }
int cuModuleLoadData(void **module, const void *image) {
  tell("module %d", memcmp(image, "\x7f" "ELF", 4) == 0);
  return *module = (void *)0x200, 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  tell("function %s", name);
  if (!strstr(name, "scale")) return 500; /* CUDA_ERROR_NOT_FOUND */
  return *function = (void *)0x300, module != (void *)0x200;
}
int cuFuncLoad(void *function) { return function != (void *)0x300; }
/* Every kernel has 1024 bytes of shared variables. */
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  return *value = attribute == 1 ? 1024 : 0, function != (void *)0x300;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
  tell("attribute %d %d", attribute, value);
  return function != (void *)0x300 || value > 227 * 1024; /* CUDA_ERROR_INVALID_VALUE */
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
  tell("launch %u,%u,%u %u,%u,%u %u stream %d: %#llx %d %lld %g", gx, gy, gz, bx, by, bz, shared,
       (int)(intptr_t)stream, *(unsigned long long *)parameters[0], *(int32_t *)parameters[1],
       (long long)*(int64_t *)parameters[2], *(float *)parameters[3]);
  return function != (void *)0x300 || extra != NULL;
}

int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                        int *status) {
  (void)version, (void)flags;
  Dl_info self;
  dladdr((void *)cuInit, &self);
  void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *address = dlsym(library, name);
  if (status) *status = *address ? 0 : 1;
  return *address ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, address, version, flags, NULL);
}
