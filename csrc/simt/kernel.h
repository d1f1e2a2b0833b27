// All that a kernel's source needs to be compiled for the emulator.
#pragma once

#include "simt/atomics.h"
#include "simt/collectives.h"
#include "simt/intrinsics.h"
#include "simt/language.h"
#include "simt/math.h"
