// CUDA graphs: what a stream captures is counted, and counted again at each launch of the graph. What the host does in
// place of kernels (copies, counts) is done once, at the capture.
#include "device.h"

using namespace device;

int device::captures = 0;

namespace {
enum { NOT_CAPTURING = 0, CAPTURING = 1 };  // cudaStreamCaptureStatus
using Held = std::shared_ptr<Graph>;

int capture_info(void* s, int* status, unsigned long long* id, void** graph, const void** nodes, size_t* n) {
  Lock hold(lock);
  Stream* stream = stream_of(s);
  Graph* capture = capture_of(stream);
  *status = capture ? CAPTURING : NOT_CAPTURING;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture;
  if (nodes) *nodes = nullptr;
  if (n) *n = 0;
  return abi::SUCCESS;
}
}  // namespace

API int cudaStreamIsCapturing(void* s, int* status) { return capture_info(s, status, nullptr, nullptr, nullptr, nullptr); }
#if CUDA_MAJOR >= 13
API int cudaStreamGetCaptureInfo(void* s, int* status, unsigned long long* id, void** graph, const void** nodes,
                                 const void** edges, size_t* n) {
  if (edges) *edges = nullptr;
  return capture_info(s, status, id, graph, nodes, n);
}
#else
API int cudaStreamGetCaptureInfo_v2(void* s, int* status, unsigned long long* id, void** graph, const void** nodes, size_t* n) {
  return capture_info(s, status, id, graph, nodes, n);
}
API int cudaStreamGetCaptureInfo(void* s, int* status, unsigned long long* id) {
  return capture_info(s, status, id, nullptr, nullptr, nullptr);
}
#endif
API int cudaThreadExchangeStreamCaptureMode(int*) { return abi::SUCCESS; }
API int cudaStreamUpdateCaptureDependencies() { return abi::SUCCESS; }

API int cudaStreamBeginCapture(void* s, int) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  Stream* stream = stream_of(s);
  if (capture_of(stream)) return record(abi::CAPTURE_UNSUPPORTED);
  stream->capture = Held(new Graph{next_handle(), true, {}});
  ++captures;
  return abi::SUCCESS;
}
API int cudaStreamEndCapture(void* s, void** graph) {
  Lock hold(lock);
  Stream* stream = stream_of(s);
  *graph = nullptr;
  if (!capture_of(stream)) return record(abi::INVALID_VALUE);
  stream->capture->open = false;
  *graph = new Held(std::move(stream->capture));
  --captures;
  return abi::SUCCESS;
}
API int cudaGraphGetNodes(Held* graph, void**, size_t* n) {
  *n = 0;
  for (auto& launches : (*graph)->launches) *n += size_t(launches);
  return abi::SUCCESS;
}
API int cudaGraphInstantiateWithFlags(Held** instance, Held* graph, unsigned long long) {
  *instance = new Held(*graph);
  return abi::SUCCESS;
}
API int cudaGraphInstantiate(Held** instance, Held* graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(instance, graph, flags);
}
API int cudaGraphLaunch(Held* instance, void* stream) {
  if (int error = standing()) return record(error);
  Lock hold(lock);
  submit(stream_of(stream));
  for (int what = 0; what < COUNTS; ++what) counts[what] += (*instance)->launches[what];
  return abi::SUCCESS;
}
API int cudaGraphDestroy(Held* graph) { delete graph; return abi::SUCCESS; }
API int cudaGraphExecDestroy(Held* instance) { delete instance; return abi::SUCCESS; }
