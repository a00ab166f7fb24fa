from pagoda_server.kernels.triton.configs import IS_INTERPRETED

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
