// Adds the operators to onnxruntime's sessions.
#include "export.h"
#include "onnxruntime/operators.h"

EDGE_EXPORT edge::ort::Status* RegisterCustomOps(edge::ort::SessionOptions* options, const edge::ort::ApiBase* base) {
    using namespace edge::ort;
    const Table api = base->get_api(kVersion);
    static Domain* domain = nullptr;  // never freed, because sessions keep a reference to it
    if (!domain) {
        Domain* made = nullptr;
        EDGE_TRY(create_domain(api, "edge.mtp", &made));
        const Op* const operators[] = {&kMatMulRows, &kMatMulCapRows, &kMatMulStatic, &kMatMulHalves, &kFeedForwardRows, &kAttendRows,
                                       &kAttendBuffers, &kReadBuffers, &kNormRows, &kResidualRows};
        for (const Op* op : operators) EDGE_TRY(add_op(api, made, op));
        domain = made;
    }
    return add_domain(api, options, domain);
}
