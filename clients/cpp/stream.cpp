// Stream an answer, print its text, and stop on an error with the field that is wrong.
#include <grpcpp/grpcpp.h>

#include <iostream>

#include "google_rpc.pb.h"
#include "pagoda/v1/inference.grpc.pb.h"

// The path of the wrong field, from the details of a status; empty if they name none.
static std::string field_of(const grpc::Status& status) {
    google::rpc::Status details;
    details.ParseFromString(status.error_details());
    google::rpc::BadRequest bad;
    for (const auto& detail : details.details())
        if (detail.UnpackTo(&bad) && bad.field_violations_size() > 0) return bad.field_violations(0).field();
    return "";
}

int main() {
    auto channel = grpc::CreateChannel("127.0.0.1:50051", grpc::InsecureChannelCredentials());
    auto inference = pagoda::v1::Inference::NewStub(channel);
    pagoda::v1::GenerateRequest request;
    request.set_message("Why is the sky blue?");
    grpc::ClientContext context;  // context.TryCancel() ends the call, and the server frees what it held
    auto stream = inference->Generate(&context, request);
    pagoda::v1::GenerateResponse event;
    while (stream->Read(&event)) std::cout << event.tokens().text() << std::flush;
    if (grpc::Status status = stream->Finish(); !status.ok()) {
        std::cerr << status.error_message() << " (field: " << field_of(status) << ")\n";
        return 1;
    }
}
