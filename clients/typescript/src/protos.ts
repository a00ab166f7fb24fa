/** The messages and services of the protocol, as generated from the protos. */
export * from "./gen/pagoda/v1/admin_pb.js";
export * from "./gen/pagoda/v1/chat_pb.js";
export * from "./gen/pagoda/v1/control_pb.js";
export * from "./gen/pagoda/v1/inference_pb.js";
export * from "./gen/pagoda/v1/trace_pb.js";
