// A driver's library whose cuInit never returns: it has all that device/cuda/driver looks for.
#include <unistd.h>

int cuInit(unsigned flags) {
	for (;;) pause();
}

#define F(name) int name(void) { return 999; }
F(cuDriverGetVersion) F(cuGetErrorName) F(cuGetErrorString) F(cuDeviceGetCount) F(cuDeviceGet) F(cuDeviceGetName)
F(cuDeviceGetUuid) F(cuDeviceTotalMem_v2) F(cuDeviceGetAttribute) F(cuDevicePrimaryCtxRetain)
F(cuDevicePrimaryCtxRelease_v2) F(cuCtxSetCurrent) F(cuMemGetInfo_v2) F(cuDeviceCanAccessPeer)
F(cuCtxEnablePeerAccess) F(cuMemcpyPeerAsync) F(cuMemAlloc_v2) F(cuMemFree_v2) F(cuMemHostAlloc)
F(cuMemHostGetDevicePointer_v2) F(cuMemFreeHost) F(cuStreamCreate) F(cuStreamDestroy_v2) F(cuStreamSynchronize)
F(cuStreamWaitEvent) F(cuStreamWriteValue32_v2) F(cuStreamWaitValue32_v2) F(cuEventCreate) F(cuEventDestroy_v2)
F(cuEventRecord) F(cuEventQuery) F(cuEventElapsedTime) F(cuMemcpyHtoDAsync_v2) F(cuMemcpyDtoHAsync_v2)
F(cuMemcpyDtoDAsync_v2) F(cuMemsetD32Async) F(cuMemsetD8Async) F(cuModuleLoadDataEx) F(cuModuleUnload)
F(cuModuleGetFunction) F(cuFuncGetAttribute) F(cuFuncSetAttribute) F(cuLaunchKernel) F(cuStreamBeginCapture_v2)
F(cuStreamEndCapture) F(cuGraphInstantiateWithFlags) F(cuGraphLaunch) F(cuGraphDestroy) F(cuGraphExecDestroy)
